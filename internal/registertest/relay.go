// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package registertest

import (
	"context"
	"net"
	"sync"
	"testing"
)

// A Relay is a connection to a server that a test can cut and freeze.
type Relay struct {
	ln     net.Listener
	target string
	wg     sync.WaitGroup

	mu     sync.Mutex
	closed bool
	down   bool          // connections end at once
	frozen chan struct{} // not nil: nothing passes until it is closed
	conns  map[net.Conn]struct{}
}

// NewRelay relays to host:port until the test ends.
func NewRelay(t *testing.T, target string) *Relay {
	t.Helper()
	ln, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &Relay{ln: ln, target: target, conns: map[net.Conn]struct{}{}}
	r.wg.Go(r.accept)
	t.Cleanup(r.close)
	return r
}

// Addr returns the address at which the relay listens, host:port.
func (r *Relay) Addr() string { return r.ln.Addr().String() }

// Cut ends all connections, and new connections as soon as they come.
func (r *Relay) Cut(t *testing.T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down = true
	r.dropLocked()
}

// Freeze lets nothing pass, either way, like a stopped server, or a network that loses everything.
func (r *Relay) Freeze(t *testing.T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.frozen == nil {
		r.frozen = make(chan struct{})
	}
}

// Mend undoes Cut and Freeze. Frozen bytes pass, late.
func (r *Relay) Mend(t *testing.T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down = false
	r.thawLocked()
}

func (r *Relay) thawLocked() {
	if r.frozen != nil {
		close(r.frozen)
		r.frozen = nil
	}
}

func (r *Relay) dropLocked() {
	for c := range r.conns {
		_ = c.Close()
	}
	clear(r.conns)
}

func (r *Relay) close() {
	r.mu.Lock()
	r.closed = true
	r.thawLocked()
	r.dropLocked()
	r.mu.Unlock()
	_ = r.ln.Close()
	r.wg.Wait()
}

func (r *Relay) accept() {
	for {
		c, err := r.ln.Accept()
		if err != nil {
			return
		}
		r.wg.Go(func() { r.serve(c) })
	}
}

// keep notes a connection. It returns false if the relay is closed or cut.
func (r *Relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.down {
		_ = c.Close()
		return false
	}
	r.conns[c] = struct{}{}
	return true
}

func (r *Relay) serve(c net.Conn) {
	if !r.keep(c) {
		return
	}
	server, err := new(net.Dialer).DialContext(context.Background(), "tcp", r.target)
	if err != nil {
		_ = c.Close()
		return
	}
	if !r.keep(server) {
		_ = c.Close()
		return
	}
	r.wg.Go(func() { r.copy(c, server) })
	r.copy(server, c)
}

// copy copies bytes, and ends both connections when one ends. Bytes that were read before a freeze
// cannot be held back: they go on after it.
func (r *Relay) copy(to, from net.Conn) {
	defer to.Close()   //nolint:errcheck // as a wire breaks
	defer from.Close() //nolint:errcheck // likewise
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		r.mu.Lock()
		frozen := r.frozen
		r.mu.Unlock()
		if frozen != nil {
			<-frozen
		}
		if n > 0 {
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
