package chaos

import (
	"time"

	"github.com/anishathalye/porcupine"
)

// outcome is the state of a key as its clients can know it: which payment it stands for, and the one final answer.
type outcome struct {
	resource string
	final    string // status and bytes; empty while there is none
}

// oneIntentOneOutcome is the sequential specification of a key: its payment never changes, its answer comes once and stays, and nobody is
// told that the key is in progress, or that the outcome is open, once it has come. A request without an answer, and a refusal before the
// key was looked at, may stand anywhere.
var oneIntentOneOutcome = porcupine.Model{
	Init: func() any { return outcome{} },
	Step: func(state, _, output any) (bool, any) {
		known, c := state.(outcome), output.(call)
		if c.resource != "" {
			if known.resource != "" && known.resource != c.resource {
				return false, state
			}
			known.resource = c.resource
		}
		switch {
		case c.isFinal():
			answer := c.String() + "\n" + string(c.body)
			if known.final != "" && known.final != answer {
				return false, state
			}
			known.final = answer
		case c.resource != "" && known.final != "": // 202, 409 in progress, 503 and 504 after an attempt: all say that it is open.
			return false, state
		case refusals[c.slug] && known.final != "": // A replay wins over the rules.
			return false, state
		}
		return true, known
	},
	DescribeOperation: func(_, output any) string { return output.(call).String() },
}

// history is what the clients of one key have seen.
func (o *operation) history() []porcupine.Operation {
	o.mu.Lock()
	defer o.mu.Unlock()
	operations := make([]porcupine.Operation, len(o.calls))
	for i, c := range o.calls {
		operations[i] = porcupine.Operation{ClientId: i, Call: c.sent.UnixNano(), Output: c, Return: c.received.UnixNano()}
	}
	return operations
}

// linearizable reports whether the history of the key could be that of one intent with one outcome. The histories are short; one that
// takes a second to judge is judged to be fine.
func (o *operation) linearizable() bool {
	return porcupine.CheckOperationsTimeout(oneIntentOneOutcome, o.history(), time.Second) != porcupine.Illegal
}
