// Command vulncheck reads what govulncheck -format json says, and decides:
//
//   - a vulnerability of a module, in code that the service calls, fails, unless it is accepted below with a reason;
//   - one of the standard library is told, and does not fail: it is mended by a newer toolchain, which is not this repository's to choose;
//   - one in code that is not called is not worth a line.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
)

// accepted are findings that do not concern this service. An entry that is not found any more fails too, so that the list does not outlive
// its reasons.
var accepted = map[string]string{
	"GO-2026-6872": "echo's rate limiter trusts X-Forwarded-For. Ours counts by merchant, and echo's middleware is not imported (depguard).",
	"GO-2026-6875": "echo's reverse proxy passes X-Real-IP on. There is no proxy here, and echo's middleware is not imported (depguard).",
}

// message is one of govulncheck's; the others have nothing that matters here.
type message struct {
	OSV *struct {
		ID      string `json:"id"`
		Summary string `json:"summary"`
	} `json:"osv"`
	Finding *struct {
		OSV          string `json:"osv"`
		FixedVersion string `json:"fixed_version"`
		Trace        []struct {
			Module   string `json:"module"`
			Version  string `json:"version"`
			Function string `json:"function"`
		} `json:"trace"`
	} `json:"finding"`
}

func main() {
	failed, err := judge(os.Stdin, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "vulncheck:", err)
		os.Exit(2)
	}
	if failed {
		os.Exit(1)
	}
}

func judge(findings io.Reader, out io.Writer) (failed bool, err error) {
	summaries := make(map[string]string)
	lines := make(map[string]string)
	found := make(map[string]bool)
	messages := 0
	for decoder := json.NewDecoder(findings); ; messages++ {
		var m message
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return true, err
		}
		if m.OSV != nil {
			summaries[m.OSV.ID] = m.OSV.Summary
		}
		if m.Finding == nil || len(m.Finding.Trace) == 0 || m.Finding.Trace[0].Function == "" {
			continue // not called
		}
		finding, where := m.Finding, m.Finding.Trace[0]
		found[finding.OSV] = true
		fixed := "not fixed yet"
		if finding.FixedVersion != "" {
			fixed = "fixed in " + finding.FixedVersion
		}
		verdict := "FAIL"
		if where.Module == "stdlib" {
			verdict = "toolchain"
		} else if _, ok := accepted[finding.OSV]; ok {
			verdict = "accepted"
		}
		failed = failed || verdict == "FAIL"
		lines[finding.OSV] = fmt.Sprintf("%-9s  %s  %s@%s, %s: %s", verdict, finding.OSV, where.Module, where.Version, fixed, summaries[finding.OSV])
	}
	if messages == 0 {
		return true, errors.New("govulncheck has said nothing at all")
	}
	for _, line := range slices.Sorted(maps.Values(lines)) {
		fmt.Fprintln(out, line)
	}
	for id := range accepted {
		if !found[id] {
			failed = true
			fmt.Fprintf(out, "FAIL       %s is accepted in tools/vulncheck and is not found any more: take it out\n", id)
		}
	}
	return failed, nil
}
