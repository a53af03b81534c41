package main

import (
	"context"
	"sync"
	"time"
)

// The two shapes of load. Intents are what a key stands for: all that is asked under one key is one intent.
const (
	shapeSpread = "spread" // every request has a key of its own
	shapeHot    = "hot"    // N clients send the same key at the same moment, then the next
)

// request sends the n-th intent once. due is when it should begin: a request that cannot begin then has waited already.
type request func(n int, due time.Time)

// spread lets the clients send one intent after the other, each its own, until the time is over or the intents are used up. It returns how many
// were begun. An intent is sent a second time with the probability that again decides.
func spread(ctx context.Context, clients, intents int, again func(n int) bool, send request) int {
	var mu sync.Mutex
	begun := 0
	next := func() (n int, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() != nil || begun == intents {
			return 0, false
		}
		begun++
		return begun - 1, true
	}
	var group sync.WaitGroup
	for range clients {
		group.Go(func() {
			for n, ok := next(); ok; n, ok = next() {
				send(n, time.Now())
				if again(n) {
					send(n, time.Now())
				}
			}
		})
	}
	group.Wait()
	return begun
}

// hot lets all clients send the same intent from one gate, waits until the last has its answer, and goes on with the next.
func hot(ctx context.Context, clients, intents int, send request) int {
	for n := range intents {
		if ctx.Err() != nil {
			return n
		}
		gate := make(chan struct{})
		var group sync.WaitGroup
		for range clients {
			group.Go(func() {
				<-gate
				send(n, time.Now())
			})
		}
		close(gate)
		group.Wait()
	}
	return intents
}

// arrivals is the open loop: requests come when they are due, whether or not earlier ones have been answered, as customers do. A request is
// measured from when it was due. A lab that waited for an answer before it sent the next request would leave out just the requests that a
// stall makes slow (coordinated omission).
//
// perIntent requests in a row carry one key: 1 is spread, more is hot. No more than inFlight are under way; what is due beyond that waits, and
// its wait counts.
func arrivals(ctx context.Context, rate float64, perIntent, intents, inFlight int, again func(n int) bool, send request) int {
	interval := time.Duration(float64(time.Second) / rate)
	places := make(chan struct{}, inFlight)
	var group sync.WaitGroup
	defer group.Wait()
	begin := time.Now()
	for i := 0; ; i++ {
		n := i / perIntent
		due := begin.Add(time.Duration(i) * interval)
		if n == intents {
			return n
		}
		if wait := time.Until(due); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			return (i + perIntent - 1) / perIntent
		}
		places <- struct{}{}
		group.Go(func() {
			defer func() { <-places }()
			send(n, due)
			if perIntent == 1 && again(n) {
				send(n, time.Now())
			}
		})
	}
}
