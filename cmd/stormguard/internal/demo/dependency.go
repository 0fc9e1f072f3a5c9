// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// dependency is the handler's dependency: a TCP server that answers each line
// with a line. While it is down, it refuses connections.
//
// Goroutines: one accepts, one serves each connection; down ends them.
type dependency struct {
	addr  string
	mu    sync.Mutex
	ln    net.Listener // nil while down
	conns map[net.Conn]struct{}
	wg    sync.WaitGroup
}

// newDependency uses a port below the range of outgoing connections: while the
// dependency is down, no outgoing connection must take its port.
func newDependency(ctx context.Context) (*dependency, error) {
	d := &dependency{conns: make(map[net.Conn]struct{})}
	var err error
	for range 100 {
		d.addr = fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(12000))
		if err = d.listen(ctx); err == nil {
			return d, nil
		}
	}
	return nil, fmt.Errorf("demo: dependency: no free port on the loopback: %w", err)
}

func (d *dependency) listen(ctx context.Context) error {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", d.addr)
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.ln = ln
	d.mu.Unlock()
	d.wg.Go(func() { d.accept(ln) })
	return nil
}

func (d *dependency) accept(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		d.mu.Lock()
		if d.ln != ln {
			d.mu.Unlock()
			_ = c.Close()
			return
		}
		d.conns[c] = struct{}{}
		d.mu.Unlock()
		d.wg.Go(func() { d.serve(c) })
	}
}

func (d *dependency) serve(c net.Conn) {
	defer func() {
		d.mu.Lock()
		delete(d.conns, c)
		d.mu.Unlock()
		_ = c.Close()
	}()
	r := bufio.NewReader(c)
	for {
		if _, err := r.ReadSlice('\n'); err != nil {
			return
		}
		if _, err := c.Write([]byte("ok\n")); err != nil {
			return
		}
	}
}

// down closes the server and all its connections.
func (d *dependency) down() {
	d.mu.Lock()
	if d.ln != nil {
		_ = d.ln.Close()
		d.ln = nil
	}
	for c := range d.conns {
		_ = c.Close()
	}
	d.mu.Unlock()
	d.wg.Wait()
}

// restart brings the server back on its port.
func (d *dependency) restart(ctx context.Context) error {
	for {
		err := d.listen(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("demo: dependency: restart: %w", err)
		}
	}
}

// errNotCharged is the error of a handler that hides its dependency's error.
var errNotCharged = errors.New("the order was not charged")

// of returns the handler's error for an error of its dependency.
func (f Failure) of(err error) error {
	if err != nil && f == Unknown {
		return errNotCharged
	}
	return err
}

// client is the handler's client of the dependency. It has one connection, and
// dials when it has none.
type client struct {
	addr string
	mu   sync.Mutex
	conn net.Conn
	r    *bufio.Reader
	line []byte
}

// callTimeout is the time limit for a dial or an answer.
const callTimeout = 2 * time.Second

// call makes one request to the dependency. After an error it closes the
// connection.
func (c *client) call(ctx context.Context, id int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		d := net.Dialer{Timeout: callTimeout}
		conn, err := d.DialContext(ctx, "tcp", c.addr)
		if err != nil {
			return err
		}
		c.conn, c.r = conn, bufio.NewReader(conn)
	}
	if err := c.ask(id); err != nil {
		c.hangUp()
		return err
	}
	return nil
}

func (c *client) ask(id int) error {
	if err := c.conn.SetDeadline(time.Now().Add(callTimeout)); err != nil {
		return err
	}
	c.line = fmt.Appendf(c.line[:0], "charge %d\n", id)
	if _, err := c.conn.Write(c.line); err != nil {
		return err
	}
	_, err := c.r.ReadSlice('\n')
	return err
}

func (c *client) hangUp() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

func (c *client) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hangUp()
}
