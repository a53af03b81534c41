package schemas

import (
	"os"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// kinds are those that deploy/kubernetes has. A file of another is refused until it is added here.
var kinds = map[metav1.TypeMeta]any{
	{APIVersion: "v1", Kind: "Namespace"}:                       new(corev1.Namespace),
	{APIVersion: "v1", Kind: "Secret"}:                          new(corev1.Secret),
	{APIVersion: "v1", Kind: "Service"}:                         new(corev1.Service),
	{APIVersion: "apps/v1", Kind: "Deployment"}:                 new(appsv1.Deployment),
	{APIVersion: "batch/v1", Kind: "Job"}:                       new(batchv1.Job),
	{APIVersion: "policy/v1", Kind: "PodDisruptionBudget"}:      new(policyv1.PodDisruptionBudget),
	{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"}: new(networkingv1.NetworkPolicy),
}

// An unknown member, a wrong type and a member that is there twice are errors. One file is one object.
func TestKubernetes(t *testing.T) {
	for _, file := range files(t, "../../deploy/kubernetes/*.yaml") {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var named metav1.TypeMeta
		if err := yaml.Unmarshal(raw, &named); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		object, ok := kinds[named]
		if !ok {
			t.Errorf("%s: unknown kind %v", file, named)
			continue
		}
		if err := yaml.UnmarshalStrict(raw, object); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}
