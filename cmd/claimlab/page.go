package main

import (
	"bytes"
	_ "embed"
	"html/template"
	"maps"
	"slices"

	"example.com/payments/internal/idempotency/strategies"
)

//go:embed report.html.tmpl
var pageSource string

var pageTemplate = template.Must(template.New("report").Parse(pageSource))

// html makes the page. It is one file with nothing to load: styles and drawings are in it, and there is no script.
func (r *report) html() ([]byte, error) {
	var figures []figure
	for _, draw := range []func() (figure, error){r.claimPlot, r.connectionsPlot, r.fatesPlot} {
		drawn, err := draw()
		if err != nil {
			return nil, err
		}
		figures = append(figures, drawn)
	}
	var b bytes.Buffer
	err := pageTemplate.Execute(&b, struct {
		Conditions string
		Verdicts   []verdict
		Figures    []figure
		Tables     []table
		Kinds      []strategies.Kind
		Promises   []string
	}{r.conditions(), r.Verdicts, figures, r.tables(), strategies.Kinds(), brokenPromises()})
	return b.Bytes(), err
}

// brokenPromises are those that some strategy does not keep, as sentences.
func brokenPromises() []string {
	var sentences []string
	for _, kind := range strategies.Kinds() {
		for _, promise := range slices.Sorted(maps.Keys(kind.Broken)) {
			sentences = append(sentences, kind.Name+" breaks "+promise+": "+kind.Broken[promise]+".")
		}
	}
	return sentences
}
