package simulator

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/go-json-experiment/json"
)

// ErrLedgerInUse means that another simulator, most likely another process, has the ledger open. Two of them would each charge
// keys that the other has already charged.
var ErrLedgerInUse = errors.New("the ledger is in use by another simulator")

type kind string

const (
	charges kind = "charge"
	refunds kind = "refund"
)

const (
	approved   = "approved"
	declined   = "declined"
	canceled   = "canceled"
	processing = "processing" // never in the ledger
)

// record is the last word on a key, and one line of the ledger: a charge, a refund, or the cancel of either.
type record struct {
	Kind          kind      `json:"kind,omitzero"`
	ID            string    `json:"id,omitzero"`
	Key           string    `json:"key"`
	Status        string    `json:"status"`
	DeclineCode   string    `json:"decline_code,omitzero"`
	Amount        int64     `json:"amount,omitzero"`
	Currency      string    `json:"currency,omitzero"`
	PaymentMethod string    `json:"payment_method,omitzero"`
	ChargeKey     string    `json:"charge_key,omitzero"`
	CreatedAt     time.Time `json:"created_at,omitzero"`
}

// ledger is an append-only file of JSON lines. A record is on disk when append returns, so a kill -9 at any moment loses no
// answer that was given; it may keep a record whose answer was not.
type ledger struct {
	file *os.File

	mu   sync.Mutex // guards next
	next *batch

	disk   sync.Mutex // held while writing; guards the batches that have left next, and broken
	broken error      // after a failed write nobody knows what the file holds: nothing more is written until it is read again
}

// batch is what gathers while the one before it is on its way to the disk: a thousand charges at once need not wait for a
// thousand fsyncs.
type batch struct {
	lines   []byte
	written bool
	err     error
}

// openLedger opens or creates the file, locks it for this process, and returns what it holds. A last line without its newline was
// torn by a crash: it was answered to nobody, and is cut off. Any other line that cannot be read is an error.
func openLedger(path string) (_ *ledger, _ []*record, err error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("open ledger: %w", err)
	}
	defer func() {
		if err != nil {
			_ = release(file) // the error that matters is err
		}
	}()
	// The kernel takes the lock back when the process ends, however it ends.
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = ErrLedgerInUse
		}
		return nil, nil, fmt.Errorf("open ledger %s: %w", path, err)
	}
	content, err := io.ReadAll(file)
	if err != nil {
		return nil, nil, fmt.Errorf("read ledger: %w", err)
	}
	whole := content[:bytes.LastIndexByte(content, '\n')+1]
	if len(whole) < len(content) {
		if err := file.Truncate(int64(len(whole))); err != nil {
			return nil, nil, fmt.Errorf("cut the torn line off ledger %s: %w", path, err)
		}
	}
	var records []*record
	for line := range bytes.Lines(whole) {
		r := new(record)
		err := json.Unmarshal(line, r)
		if err == nil && (r.Key == "" || r.Kind != charges && r.Kind != refunds) {
			err = errors.New("not a record of this ledger")
		}
		if err != nil {
			return nil, nil, fmt.Errorf("read ledger %s, line %d: %w", path, len(records)+1, err)
		}
		records = append(records, r)
	}
	return &ledger{file: file, next: new(batch)}, records, nil
}

// append returns when the record is on disk. After an error it may or may not be.
func (l *ledger) append(r *record) error {
	line, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	l.mu.Lock()
	mine := l.next
	mine.lines = append(append(mine.lines, line...), '\n')
	l.mu.Unlock()

	l.disk.Lock()
	defer l.disk.Unlock()
	if !mine.written { // else a neighbour in the batch has written for all of it
		l.mu.Lock()
		l.next = new(batch)
		l.mu.Unlock()
		mine.written, mine.err = true, l.write(mine.lines)
	}
	return mine.err
}

func (l *ledger) write(lines []byte) error {
	if l.broken != nil {
		return l.broken
	}
	_, err := l.file.Write(lines)
	if err == nil {
		err = l.file.Sync()
	}
	if err != nil {
		l.broken = fmt.Errorf("write ledger: %w", err)
	}
	return l.broken
}

func (l *ledger) close() error {
	l.disk.Lock()
	defer l.disk.Unlock()
	if errors.Is(l.broken, os.ErrClosed) {
		return nil // already
	}
	l.broken = os.ErrClosed
	return release(l.file)
}

// release unlocks by name, not by closing alone: a child process that is just being started has a copy of the open file until its
// exec, and the lock would last as long.
func release(file *os.File) error {
	_ = syscall.Flock(int(file.Fd()), syscall.LOCK_UN)
	return file.Close()
}
