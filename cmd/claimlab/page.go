package main

import (
	_ "embed"
	"html/template"
	"os"

	"example.com/payments/internal/idempotency/strategies"
)

//go:embed report.html.tmpl
var pageSource string

var pageTemplate = template.Must(template.New("report").Parse(pageSource))

// writeHTML writes the page. It is one file with nothing to load: styles and drawings are in it, and there is no script.
func (r *report) writeHTML(path string) error {
	claim, err := r.claimPlot()
	if err != nil {
		return err
	}
	held, err := r.connectionsPlot()
	if err != nil {
		return err
	}
	losers, err := r.fatesPlot()
	if err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	err = pageTemplate.Execute(f, struct {
		Conditions string
		Verdicts   []verdict
		Figures    []figure
		Tables     []table
		Kinds      []strategies.Kind
		Promises   []string
	}{r.conditions(), r.Verdicts, []figure{claim, held, losers}, r.tables(), strategies.Kinds(), brokenPromises()})
	if err != nil {
		return err
	}
	return f.Close()
}

// brokenPromises are those that some strategy does not keep, as sentences.
func brokenPromises() []string {
	var sentences []string
	for _, kind := range strategies.Kinds() {
		for _, promise := range []string{strategies.PromiseTogether, strategies.PromiseOneWrite, strategies.PromiseDurable} {
			if because, broken := kind.Broken[promise]; broken {
				sentences = append(sentences, kind.Name+" breaks "+promise+": "+because+".")
			}
		}
	}
	return sentences
}
