// Package chaos shows that the service's promises hold when everything around it fails. It judges by the gateway's own ledger and by
// the rows of the database, never by the service's word.
//
// A [World] is the built program in one to three replicas, a PostgreSQL of its own, and the simulated gateway as a process of its own:
//
//	clients ──▶ replica ──▶ toxiproxy ──▶ [PgBouncer] ──▶ PostgreSQL      (its data on a small tmpfs, where root)
//	              └───────▶ toxiproxy ──▶ misbehaving proxy ──▶ gateway   (doors at which a request can be held)
//
// Nothing in the service knows of it, except that a build with the tag "chaos" reads CLOCK_OFFSET: a process's clock cannot be shifted
// from outside. The named points at which a process is killed are reached from outside: a door of the proxy, a lock that another session
// holds, a network that carries one way.
//
// Four things use a World:
//
//	[Run]         many clients under a schedule of faults that the seed decides, then the invariants
//	[Cells]       one fault at one point with one payment, many times: the crash matrix
//	[Failover]    customers again, on a cluster whose leader is killed
//	[Scenarios]   the shortest way to see a mutant fail, to know that the harness can
//
// The invariants are in invariants.go; a [Violation] is one that did not hold. It runs on Linux.
package chaos
