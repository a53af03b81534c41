package schemas

import (
	"os"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
)

func TestCompose(t *testing.T) {
	const file = "../../compose.yaml"
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	project, err := loader.LoadWithContext(t.Context(), types.ConfigDetails{
		WorkingDir:  "../..",
		ConfigFiles: []types.ConfigFile{{Filename: file, Content: raw}},
	}, func(options *loader.Options) { options.SetProjectName("payments", true) })
	if err != nil {
		t.Fatal(err)
	}
	if err := project.CheckContainerNameUnicity(); err != nil {
		t.Error(err)
	}
	if len(project.Services) == 0 {
		t.Error("no services")
	}
}
