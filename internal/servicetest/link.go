package servicetest

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
)

// Link is the network between the replicas and their database.
type Link struct {
	URL string // the database's address through the link

	t        testing.TB
	listener net.Listener
	dial     func() (net.Conn, error)

	mu      sync.Mutex
	cut     bool
	refused chan struct{}
	lines   map[string]*line // by the replica's address
	done    sync.WaitGroup
}

func newLink(t testing.TB, databaseURL string) *Link {
	t.Helper()
	config, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &Link{t: t, listener: listener, refused: make(chan struct{}, 1), lines: map[string]*line{}}
	l.dial = func() (net.Conn, error) {
		port := strconv.Itoa(int(config.Port))
		if strings.HasPrefix(config.Host, "/") {
			return net.Dial("unix", filepath.Join(config.Host, ".s.PGSQL."+port))
		}
		return net.Dial("tcp", net.JoinHostPort(config.Host, port))
	}
	address := listener.Addr().(*net.TCPAddr)
	if u, err := url.Parse(databaseURL); err == nil && u.Scheme != "" {
		u.Host = address.String()
		l.URL = u.String()
	} else {
		l.URL = fmt.Sprintf("%s host=127.0.0.1 port=%d", databaseURL, address.Port)
	}
	l.done.Go(l.accept)
	return l
}

func (l *Link) accept() {
	for {
		client, err := l.listener.Accept()
		if err != nil {
			return
		}
		l.mu.Lock()
		cut := l.cut
		l.mu.Unlock()
		if cut {
			client.Close()
			select {
			case l.refused <- struct{}{}:
			default:
			}
			continue
		}
		server, err := l.dial()
		if err != nil {
			client.Close()
			continue
		}
		connected := &line{client: client, server: server}
		l.mu.Lock()
		l.lines[client.RemoteAddr().String()] = connected
		l.mu.Unlock()
		l.done.Go(connected.up)
		l.done.Go(connected.down)
	}
}

// Cut breaks all connections and refuses new ones until [Link.Restore].
func (l *Link) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = true
	for _, connected := range l.lines {
		connected.close()
	}
}

// AwaitRefusal waits until a replica has dialled in vain.
func (l *Link) AwaitRefusal() {
	l.t.Helper()
	await(l.t, "a connection to the database is refused", l.refused)
}

// Restore ends [Link.Cut].
func (l *Link) Restore() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
}

func (l *Link) close() {
	l.listener.Close()
	l.Cut()
	l.done.Wait()
}

// LoseAnswer has the replica's next statement of that name carried out and its answer lost, with the connection.
func (l *Link) LoseAnswer(r *Replica, name string) {
	r.Queries.Before(name, 1, func(conn *pgx.Conn) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.lines[conn.PgConn().Conn().LocalAddr().String()].armed.Store(true)
	})
}

// line is one connection of a replica.
type line struct {
	client, server net.Conn
	armed          atomic.Bool // lose the answer to the next statement that is executed
	losing         atomic.Bool // it has been sent, and the answer must not come through
}

func (l *line) close() {
	l.client.Close()
	l.server.Close()
}

// up carries what the replica says. While the line is armed it reads along: an execution, prepared or simple, is what counts, not the
// preparation that may come before it. The line is armed between two exchanges, so at the beginning of a message.
func (l *line) up() {
	defer l.close()
	var heard messages
	buffer := make([]byte, 64<<10)
	for {
		n, err := l.client.Read(buffer)
		if err != nil {
			return
		}
		if l.armed.Load() && heard.has(buffer[:n], 'E', 'Q') {
			l.losing.Store(true)
		}
		if _, err := l.server.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// down carries what the database says. An answer that is to be lost is heard to its end: then the statement has been committed.
func (l *line) down() {
	defer l.close()
	var heard messages
	buffer := make([]byte, 64<<10)
	for {
		n, err := l.server.Read(buffer)
		if err != nil {
			return
		}
		if l.losing.Load() {
			if heard.has(buffer[:n], 'Z') {
				return
			}
			continue
		}
		if _, err := l.client.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// messages are those of PostgreSQL's protocol: a type, a length, and what the length says.
type messages struct{ rest []byte }

// has reads on and tells whether a message of one of the types has begun.
func (m *messages) has(more []byte, types ...byte) (found bool) {
	m.rest = append(m.rest, more...)
	for len(m.rest) >= 5 {
		for _, kind := range types {
			found = found || m.rest[0] == kind
		}
		length := 1 + int(binary.BigEndian.Uint32(m.rest[1:5]))
		if len(m.rest) < length {
			return found
		}
		m.rest = m.rest[length:]
	}
	return found
}
