package chaos

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// link is a stretch of network that can fail.
type link struct {
	mu    sync.Mutex
	proxy *toxiproxy.Proxy
}

var toxics = toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())

func newLink(name, upstream string) (*link, error) {
	l := &link{proxy: toxiproxy.NewProxy(toxics, name, "127.0.0.1:0", upstream)}
	return l, l.proxy.Start()
}

func (l *link) address() string { return l.proxy.Listen }

// cut breaks all connections and refuses new ones.
func (l *link) cut() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.proxy.Stop()
	return nil
}

// slow delays everything, both ways.
func (l *link) slow(milliseconds int) error {
	return l.add(fmt.Sprintf(`{"type":"latency","stream":"%%s","attributes":{"latency":%d,"jitter":%d}}`, milliseconds, milliseconds/2), "upstream", "downstream")
}

// swallow lets nothing through in these directions any more; the connections stay open. One direction alone is a half-closed network: what
// was asked for is done, and the answer never comes, or the other way round.
func (l *link) swallow(directions ...string) error {
	return l.add(`{"type":"timeout","stream":"%s","attributes":{"timeout":0}}`, directions...)
}

func (l *link) add(toxic string, directions ...string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, direction := range directions {
		if _, err := l.proxy.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(toxic, direction))); err != nil {
			return fmt.Errorf("add toxic to %s: %w", l.proxy.Name, err)
		}
	}
	return nil
}

// mend breaks what is left of the connections and lets new ones through.
func (l *link) mend() error { return l.lead(l.proxy.Upstream) }

// lead is mend, to another place.
func (l *link) lead(upstream string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.proxy.Stop()
	l.proxy.Toxics.ResetToxics(context.Background())
	l.proxy.Upstream = upstream
	return l.proxy.Start()
}

func (l *link) close() { _ = l.cut() }
