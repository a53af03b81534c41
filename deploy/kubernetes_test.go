package deploy_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// manifest is what the tests want of any of the kinds.
type manifest struct {
	Kind     string
	Metadata struct {
		Name, Namespace string
		Annotations     map[string]string
	}
	StringData map[string]string `yaml:"stringData"`
	Spec       struct {
		Replicas       int
		Selector       any
		MaxUnavailable int `yaml:"maxUnavailable"`
		Template       struct {
			Metadata struct{ Labels, Annotations map[string]string }
			Spec     podSpec
		}
		PodSelector podSelector `yaml:"podSelector"`
	}
}

type podSelector struct {
	MatchLabels map[string]string `yaml:"matchLabels"`
}

type podSpec struct {
	RestartPolicy                 string `yaml:"restartPolicy"`
	AutomountServiceAccountToken  *bool  `yaml:"automountServiceAccountToken"`
	TerminationGracePeriodSeconds int    `yaml:"terminationGracePeriodSeconds"`
	SecurityContext               struct {
		RunAsNonRoot   bool                  `yaml:"runAsNonRoot"`
		RunAsUser      int                   `yaml:"runAsUser"`
		SeccompProfile struct{ Type string } `yaml:"seccompProfile"`
	} `yaml:"securityContext"`
	Containers []container
}

type container struct {
	Name, Image string
	Args        []string
	Ports       []struct {
		Name          string
		ContainerPort int `yaml:"containerPort"`
	}
	Env []struct {
		Name, Value string
		ValueFrom   struct {
			SecretKeyRef struct{ Name, Key string } `yaml:"secretKeyRef"`
		} `yaml:"valueFrom"`
	}
	Lifecycle struct {
		PreStop struct {
			Sleep struct{ Seconds int }
		} `yaml:"preStop"`
	}
	StartupProbe   probe `yaml:"startupProbe"`
	LivenessProbe  probe `yaml:"livenessProbe"`
	ReadinessProbe probe `yaml:"readinessProbe"`
	Resources      struct {
		Requests, Limits map[string]string
	}
	SecurityContext struct {
		AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
		ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
		Capabilities             struct{ Drop []string }
	} `yaml:"securityContext"`
}

type probe struct {
	HTTPGet struct{ Path, Port string } `yaml:"httpGet"`
}

func (c container) environment() map[string]string {
	environment := make(map[string]string)
	for _, variable := range c.Env {
		environment[variable.Name] = variable.Value
	}
	return environment
}

// manifests are all of deploy/kubernetes, by kind. Each kind is there once.
func manifests(t *testing.T) map[string]manifest {
	t.Helper()
	files, err := filepath.Glob("kubernetes/*.yaml")
	require.NoError(t, err)
	all := make(map[string]manifest)
	for _, file := range files {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		for decoder := yaml.NewDecoder(bytes.NewReader(raw)); ; {
			var m manifest
			if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
				break
			} else {
				require.NoError(t, err, file)
			}
			require.NotContains(t, all, m.Kind, file)
			all[m.Kind] = m
		}
	}
	return all
}

func TestKubernetes(t *testing.T) {
	t.Parallel()
	all := manifests(t)
	deployment, job := all["Deployment"], all["Job"]
	pod := deployment.Spec.Template.Spec
	require.Len(t, pod.Containers, 1)
	serve := pod.Containers[0]

	t.Run("PutsEverythingIntoOneNamespace", func(t *testing.T) {
		t.Parallel()
		for kind, m := range all {
			if kind != "Namespace" {
				require.Equal(t, all["Namespace"].Metadata.Name, m.Metadata.Namespace, kind)
			}
		}
	})

	t.Run("RunsAtLeastTwoReplicasAndKeepsOneWhenNodesAreDrained", func(t *testing.T) {
		t.Parallel()
		require.GreaterOrEqual(t, deployment.Spec.Replicas, 2)
		require.Equal(t, 1, all["PodDisruptionBudget"].Spec.MaxUnavailable)
	})

	t.Run("GivesAPaymentInFlightTheTimeToEnd", func(t *testing.T) {
		t.Parallel()
		grace := time.Duration(pod.TerminationGracePeriodSeconds) * time.Second
		preStop := time.Duration(serve.Lifecycle.PreStop.Sleep.Seconds) * time.Second
		require.Positive(t, preStop)
		require.Greater(t, grace, preStop+shutdownTimeout(t, serve.environment()))
	})

	t.Run("AsksWhetherItIsAliveAndWhetherItIsReady", func(t *testing.T) {
		t.Parallel()
		for path, probes := range map[string][]probe{"/livez": {serve.LivenessProbe, serve.StartupProbe}, "/readyz": {serve.ReadinessProbe}} {
			for _, probe := range probes {
				require.Equal(t, path, probe.HTTPGet.Path)
				require.Equal(t, "http", probe.HTTPGet.Port)
			}
		}
	})

	t.Run("NamesThePortsThatTheSettingsOpen", func(t *testing.T) {
		t.Parallel()
		ports := make(map[string]int)
		for _, port := range serve.Ports {
			ports[port.Name] = port.ContainerPort
		}
		require.Equal(t, map[string]int{"http": 8080, "admin": 9090}, ports)
		require.Equal(t, ":8080", serve.environment()["LISTEN_ADDR"])
		require.Equal(t, ":9090", serve.environment()["ADMIN_ADDR"])
		require.Equal(t, "9090", deployment.Spec.Template.Metadata.Annotations["prometheus.io/port"])
	})

	t.Run("SelectsThePodsThatItMakes", func(t *testing.T) {
		t.Parallel()
		labels := deployment.Spec.Template.Metadata.Labels
		require.Equal(t, labels, labelsOf(t, deployment.Spec.Selector))
		require.Equal(t, labels, labelsOf(t, all["PodDisruptionBudget"].Spec.Selector))
		require.Equal(t, labels, labelsOf(t, all["Service"].Spec.Selector))
		require.Equal(t, labels, all["NetworkPolicy"].Spec.PodSelector.MatchLabels)
		require.NotEqual(t, labels, job.Spec.Template.Metadata.Labels, "requests must not be sent to the migration")
	})

	t.Run("MigratesWithTheImageThatServes", func(t *testing.T) {
		t.Parallel()
		migrate := job.Spec.Template.Spec.Containers[0]
		require.Equal(t, serve.Image, migrate.Image)
		require.NotContains(t, serve.Image, ":latest")
		require.Equal(t, []string{"serve"}, serve.Args)
		require.Equal(t, []string{"migrate", "up"}, migrate.Args)
		require.Equal(t, "Never", job.Spec.Template.Spec.RestartPolicy)
	})

	t.Run("SetsOnlyWhatTheServiceReads", func(t *testing.T) {
		t.Parallel()
		for _, c := range []container{serve, job.Spec.Template.Spec.Containers[0]} {
			requireKnownSettings(t, c.environment())
			for _, variable := range c.Env {
				if variable.Name == "DATABASE_URL" {
					require.Equal(t, all["Secret"].Metadata.Name, variable.ValueFrom.SecretKeyRef.Name)
					require.Contains(t, all["Secret"].StringData, variable.ValueFrom.SecretKeyRef.Key)
					require.Empty(t, variable.Value)
				}
			}
		}
		require.Contains(t, all["Secret"].StringData["DATABASE_URL"], "sslmode=verify-full")
		require.Contains(t, all["Secret"].StringData["DATABASE_URL"], "REPLACE_ME", "an example, not a secret")
	})

	t.Run("GivesNobodyMoreThanTheyNeed", func(t *testing.T) {
		t.Parallel()
		for _, pod := range []podSpec{pod, job.Spec.Template.Spec} {
			require.True(t, pod.SecurityContext.RunAsNonRoot)
			require.NotZero(t, pod.SecurityContext.RunAsUser)
			require.Equal(t, "RuntimeDefault", pod.SecurityContext.SeccompProfile.Type)
			require.NotNil(t, pod.AutomountServiceAccountToken)
			require.False(t, *pod.AutomountServiceAccountToken)
			for _, c := range pod.Containers {
				require.NotNil(t, c.SecurityContext.AllowPrivilegeEscalation)
				require.False(t, *c.SecurityContext.AllowPrivilegeEscalation)
				require.True(t, c.SecurityContext.ReadOnlyRootFilesystem)
				require.Equal(t, []string{"ALL"}, c.SecurityContext.Capabilities.Drop)
				for _, resource := range []string{"cpu", "memory"} {
					require.NotEmpty(t, c.Resources.Requests[resource], "%s %s", c.Name, resource)
					require.NotEmpty(t, c.Resources.Limits[resource], "%s %s", c.Name, resource)
				}
			}
		}
	})
}

// labelsOf is a selector's labels, in either of the two forms that the kinds have.
func labelsOf(t *testing.T, selector any) map[string]string {
	t.Helper()
	members, ok := selector.(map[string]any)
	require.True(t, ok)
	if nested, ok := members["matchLabels"].(map[string]any); ok {
		members = nested
	}
	labels := make(map[string]string)
	for name, value := range members {
		labels[name], ok = value.(string)
		require.True(t, ok)
	}
	return labels
}
