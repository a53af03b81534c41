package main

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"math"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"example.com/payments/internal/idempotency/strategies"
)

// The palette of Okabe and Ito, which the colour-blind can tell apart. Nothing is told by colour alone: points differ in shape, lines in their
// dashes, and the parts of a bar carry their share in figures and are in the legend's order.
var (
	black     = color.RGBA{0x00, 0x00, 0x00, 0xff}
	orange    = color.RGBA{0xe6, 0x9f, 0x00, 0xff}
	skyBlue   = color.RGBA{0x56, 0xb4, 0xe9, 0xff}
	green     = color.RGBA{0x00, 0x9e, 0x73, 0xff}
	yellow    = color.RGBA{0xf0, 0xe4, 0x42, 0xff}
	blue      = color.RGBA{0x00, 0x72, 0xb2, 0xff}
	vermilion = color.RGBA{0xd5, 0x5e, 0x00, 0xff}
	purple    = color.RGBA{0xcc, 0x79, 0xa7, 0xff}
)

// figure is a plot with the sentence that it shows.
type figure struct {
	SVG      template.HTML
	Sentence string
}

// The width of a printed page, in points.
const pageWidth = vg.Length(720)

func newPlot(title, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.Y.Label.Text = title, y
	p.Title.TextStyle.Font.Size, p.Y.Label.TextStyle.Font.Size = 11, 10
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Tick.Label.Font.Size = 9
	}
	for _, style := range []*text.Style{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle} {
		style.Font.Variant = "Sans"
	}
	p.Legend.TextStyle.Font.Size, p.Legend.Padding, p.Legend.ThumbnailWidth = 9, 3, 26
	return p
}

// names puts the strategies' names below a plot, slanted so that they do not run into each other.
func names(p *plot.Plot, cells []*result) {
	labels := make([]string, len(cells))
	for i, c := range cells {
		labels[i] = c.Strategy
	}
	p.NominalX(labels...)
	p.X.Tick.Label.Rotation = math.Pi / 7
	p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = draw.XRight, draw.YTop
	p.X.Min, p.X.Max = -0.5, float64(len(cells))-0.5
}

// svg draws plots beside and below each other, two in a row.
func svg(plots []*plot.Plot, height vg.Length, alt string) (template.HTML, error) {
	columns := min(len(plots), 2)
	rows := (len(plots) + columns - 1) / columns
	grid := make([][]*plot.Plot, rows)
	for i := range grid {
		grid[i] = make([]*plot.Plot, columns)
		copy(grid[i], plots[i*columns:min((i+1)*columns, len(plots))])
	}
	canvas := vgsvg.New(pageWidth, height*vg.Length(rows))
	for i, row := range plot.Align(grid, draw.Tiles{Rows: rows, Cols: columns, PadX: 14, PadY: 12, PadTop: 4, PadBottom: 4, PadLeft: 4, PadRight: 4}, draw.New(canvas)) {
		for j, part := range row {
			if grid[i][j] != nil {
				grid[i][j].Draw(part)
			}
		}
	}
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return "", err
	}
	// In a page it is an element, not a document, and has a text for those who do not see it.
	_, element, _ := strings.Cut(b.String(), "<svg")
	return template.HTML(fmt.Sprintf(`<svg role="img" aria-label="%s"%s`, template.HTMLEscapeString(alt), element)), nil
}

// claimPlot has one panel for each load in which the five are compared, on a logarithmic scale.
func (r *report) claimPlot() (figure, error) {
	var plots []*plot.Plot
	var sentences []string
	for _, g := range r.groups() {
		if len(g.Cells) == 0 || r.isHeldGroup(g) {
			continue
		}
		p := newPlot(g.String(), "claim, ms")
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		names(p, g.Cells)
		low, high := math.Inf(1), 0.0
		for _, mark := range []struct {
			name  string
			shape draw.GlyphDrawer
			color color.Color
			of    func(quantiles) *float64
		}{
			{"p50", draw.CircleGlyph{}, blue, func(q quantiles) *float64 { return q.P50 }},
			{"p95", draw.PyramidGlyph{}, orange, func(q quantiles) *float64 { return q.P95 }},
			{"p99", draw.CrossGlyph{}, black, func(q quantiles) *float64 { return q.P99 }},
		} {
			var points plotter.XYs
			for i, c := range g.Cells {
				q := c.ClaimWinner
				if g.Shape == shapeHot {
					q = c.ClaimLoser
				}
				if ms := mark.of(q); ms != nil && *ms > 0 {
					points = append(points, plotter.XY{X: float64(i), Y: *ms})
					low, high = min(low, *ms), max(high, *ms)
				}
			}
			if len(points) == 0 {
				continue
			}
			scatter, err := plotter.NewScatter(points)
			if err != nil {
				return figure{}, err
			}
			scatter.GlyphStyle = draw.GlyphStyle{Color: mark.color, Radius: 4, Shape: mark.shape}
			p.Add(scatter)
			p.Legend.Add(mark.name, scatter)
		}
		if high == 0 {
			continue
		}
		p.Y.Min, p.Y.Max = low/1.5, high*6
		p.Legend.Top = true
		p.Add(plotter.NewGrid())
		plots = append(plots, p)
		sentences = append(sentences, claimSentence(g))
	}
	return drawn(plots, 250, strings.Join(append(sentences, "(Winners where all keys differ, losers on the hot key; the scale is logarithmic.)"), " "))
}

// claimSentence says between what the claims of those strategies lie that are meant to be used.
func claimSentence(g group) string {
	var quickest, slowest *result
	p50 := func(c *result) *float64 {
		if g.Shape == shapeHot {
			return c.ClaimLoser.P50
		}
		return c.ClaimWinner.P50
	}
	for _, c := range g.Cells {
		if !c.usable() || p50(c) == nil {
			continue
		}
		if quickest == nil || *p50(c) < *p50(quickest) {
			quickest = c
		}
		if slowest == nil || *p50(c) > *p50(slowest) {
			slowest = c
		}
	}
	if quickest == nil {
		return ""
	}
	return fmt.Sprintf("With %s, half of the claims are decided within %s ms (%s) to %s ms (%s).", g, milliseconds(p50(quickest)), quickest.Strategy, milliseconds(p50(slowest)), slowest.Strategy)
}

// isHeldGroup says that the load is there for the held forms.
func (r *report) isHeldGroup(g group) bool {
	for _, c := range g.Cells {
		if c.Strategy == strategies.NameRowLockHeld || c.Strategy == strategies.NameAdvisoryLockHeld {
			return true
		}
	}
	return false
}

// connectionsPlot shows the held forms and the default under the same load.
func (r *report) connectionsPlot() (figure, error) {
	styles := map[string]struct {
		color  color.Color
		dashes []vg.Length
		shape  draw.GlyphDrawer
	}{
		strategies.NameOnConflict:       {blue, nil, draw.CircleGlyph{}},
		strategies.NameRowLockHeld:      {vermilion, []vg.Length{6, 3}, draw.PyramidGlyph{}},
		strategies.NameAdvisoryLockHeld: {green, []vg.Length{2, 2}, draw.BoxGlyph{}},
	}
	var plots []*plot.Plot
	sentence := "Connections out of the pool, over the time of one slice."
	for _, g := range r.groups() {
		if !r.isHeldGroup(g) {
			continue
		}
		p := newPlot(g.String(), "connections held")
		p.X.Label.Text = "seconds"
		for _, c := range g.Cells {
			style, known := styles[c.Strategy]
			if !known || len(c.Held) == 0 {
				continue
			}
			points := make(plotter.XYs, len(c.Held))
			var marks plotter.XYs
			for i, at := range c.Held {
				points[i] = plotter.XY{X: at.Seconds, Y: float64(at.Held)}
				if i%max(len(c.Held)/12, 1) == 0 {
					marks = append(marks, points[i])
				}
			}
			line, err := plotter.NewLine(points)
			if err != nil {
				return figure{}, err
			}
			line.LineStyle = draw.LineStyle{Color: style.color, Width: 1.4, Dashes: style.dashes}
			scatter, err := plotter.NewScatter(marks)
			if err != nil {
				return figure{}, err
			}
			scatter.GlyphStyle = draw.GlyphStyle{Color: style.color, Radius: 3.2, Shape: style.shape}
			p.Add(line, scatter)
			p.Legend.Add(c.Strategy, line, scatter)
		}
		limit := plotter.NewFunction(func(float64) float64 { return float64(r.Load.Pool) })
		limit.LineStyle = draw.LineStyle{Color: black, Width: 0.8, Dashes: []vg.Length{1, 3}}
		p.Add(limit)
		p.Legend.Add(fmt.Sprintf("the pool: %d", r.Load.Pool), limit)
		p.Legend.Top, p.Legend.YOffs = true, -2
		p.Y.Min, p.Y.Max = 0, float64(r.Load.Pool)*1.55
		plots = append(plots, p)
		own, held := r.find(strategies.NameOnConflict, g.Shape, g.Gateway), r.find(strategies.NameRowLockHeld, g.Shape, g.Gateway)
		if g.Shape == shapeSpread && own != nil && held != nil {
			sentence = fmt.Sprintf("Over a gateway of %s the held lock keeps %.1f of %d connections out on average, %d at its worst, and of its %s calls of the gateway %s kept one; the default %.1f on average, and %s of its %s calls.",
				gatewayTime(g.Gateway), held.HeldMean, r.Load.Pool, held.HeldMax, count(held.GatewayCalls), count(held.HeldAtTheGateway),
				own.HeldMean, count(own.HeldAtTheGateway), count(own.GatewayCalls))
		}
	}
	return drawn(plots, 250, sentence)
}

// fatesPlot stacks the losers of the hot key by how they ended.
func (r *report) fatesPlot() (figure, error) {
	colors := map[fate]color.Color{
		fateReplayed: skyBlue, fateInFlight: yellow, fateRefused: purple, fateNoConnection: vermilion, fateTimedOut: orange, fateDeadlock: black, fateFailed: green,
	}
	var plots []*plot.Plot
	sentence := "Losers of the hot key by how they ended."
	for _, g := range r.groups() {
		if g.Shape != shapeHot {
			continue
		}
		p := newPlot(g.String(), "% of losers")
		names(p, g.Cells)
		width := vg.Length(200) / vg.Length(max(len(g.Cells), 4))
		base := make(plotter.Values, len(g.Cells))
		var below *plotter.BarChart
		var labels plotter.XYLabels
		for _, f := range fates {
			values, any := make(plotter.Values, len(g.Cells)), false
			for i, c := range g.Cells {
				for _, e := range c.Fates {
					if e.Fate == f {
						values[i], any = 100*e.Share, true
					}
				}
				if values[i] >= 8 {
					labels.XYs = append(labels.XYs, plotter.XY{X: float64(i), Y: base[i] + values[i]/2})
					labels.Labels = append(labels.Labels, fmt.Sprintf("%.0f", values[i]))
				}
				base[i] += values[i]
			}
			if !any {
				continue
			}
			bars, err := plotter.NewBarChart(values, width)
			if err != nil {
				return figure{}, err
			}
			bars.Color, bars.LineStyle = colors[f], draw.LineStyle{Color: black, Width: 0.6}
			if below != nil {
				bars.StackOn(below)
			}
			below = bars
			p.Add(bars)
			p.Legend.Add(string(f), bars)
		}
		if below == nil {
			continue
		}
		if len(labels.Labels) > 0 {
			shares, err := plotter.NewLabels(labels)
			if err != nil {
				return figure{}, err
			}
			for i := range shares.TextStyle {
				shares.TextStyle[i] = text.Style{Color: black, Font: font.From(p.X.Tick.Label.Font, 8), XAlign: draw.XCenter, YAlign: draw.YCenter, Handler: plot.DefaultTextHandler}
			}
			p.Add(shares)
		}
		p.Legend.Top = true
		p.Y.Min, p.Y.Max = 0, 150
		p.Y.Tick.Marker = plot.ConstantTicks{{Value: 0, Label: "0"}, {Value: 25, Label: "25"}, {Value: 50, Label: "50"}, {Value: 75, Label: "75"}, {Value: 100, Label: "100"}}
		plots = append(plots, p)
		own, held := r.find(strategies.NameOnConflict, g.Shape, g.Gateway), r.find(strategies.NameRowLockHeld, g.Shape, g.Gateway)
		if own != nil && held != nil {
			sentence = fmt.Sprintf("A loser of the default is told at once, within %s ms (p50), that the first request is at work; a loser of a held lock waits %s ms (p50) for an answer, and keeps a connection while it waits.",
				milliseconds(own.ClaimLoser.P50), milliseconds(held.ClaimLoser.P50))
		}
	}
	return drawn(plots, 250, sentence)
}

// drawn is the figure of the plots, or none when the run has no cells for it.
func drawn(plots []*plot.Plot, height vg.Length, sentence string) (figure, error) {
	if len(plots) == 0 {
		return figure{Sentence: "This run has no cells for this figure."}, nil
	}
	drawing, err := svg(plots, height, sentence)
	return figure{drawing, sentence}, err
}
