// Package k6 is where the k6 scripts are, and the Go test that runs them against the service without k6. See README.md.
package k6
