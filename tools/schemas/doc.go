// Package schemas holds the files of deploy/ against the published types of those who read them: Grafana's dashboards, the Compose
// specification, Kubernetes' API. It is a module of its own, so that the service depends on none of them.
package schemas
