// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// If a schedule has faults of the network, each consumer has a network namespace of its own.
// From there it reaches only itself:
//
//	namespace of a consumer                           the run
//	client ── TCP, loses packets ── its carrier ── unix socket ── network ── TCP ── broker
//	       ─────────────────────────────────────── unix socket ── network ── TCP ── dependency, recorder, marks
//
// The carrier listens on the broker's own address, so no client needs to know of the carrier.

const (
	chunk  = 64 << 10               // bytes read at once
	lately = 100 * time.Millisecond // how late a delay makes a read
)

// network carries the connections of the consumers. Its faults hit only connections to the
// broker. Goroutines: one accepts, two carry a connection; close ends them.
type network struct {
	path   string   // path of the unix socket
	broker []string // addresses of the broker
	l      net.Listener

	mu    sync.Mutex
	held  chan struct{}     // not nil in a blackhole; closed at its end
	late  bool              // a delay is on
	count int               // reads that were held or late in this fault
	conns map[net.Conn]bool // both ends of each connection; true if it leads to the broker
	over  bool              // close was called
	wg    sync.WaitGroup
}

func newNetwork(dir, broker, address string) (*network, error) {
	addrs, err := loopback(broker, address)
	if err != nil {
		return nil, err
	}
	n := &network{path: filepath.Join(dir, "network"), broker: addrs, conns: make(map[net.Conn]bool)}
	if n.l, err = net.Listen("unix", n.path); err != nil { //nolint:noctx // a file
		return nil, err
	}
	n.wg.Go(func() {
		for {
			c, err := n.l.Accept()
			if err != nil {
				return
			}
			n.wg.Go(func() { n.connect(c) })
		}
	})
	return n, nil
}

// ports are the default ports, by broker.
var ports = map[string]string{"nats": "4222", "kafka": "9092", "rabbitmq": "5672"}

// loopback returns the addresses of a broker, and refuses any outside the loopback. They must
// include all addresses that the broker tells its clients.
func loopback(broker, address string) (all []string, err error) {
	for a := range strings.SplitSeq(address, ",") {
		if !strings.Contains(a, "://") {
			a = "tcp://" + a
		}
		u, err := url.Parse(a)
		if err != nil {
			return nil, fmt.Errorf("chaos: url: of %s: not an address", broker) // the address may have a password
		}
		host := u.Hostname()
		a = net.JoinHostPort(host, cmp.Or(u.Port(), ports[broker]))
		if ip := net.ParseIP(host); host != "localhost" && !ip.IsLoopback() {
			return nil, fmt.Errorf("chaos: url: host %q is not on the loopback, where faults of the network are", host)
		}
		all = append(all, a)
	}
	return all, nil
}

// connect joins a consumer's connection to the address in its first line.
func (n *network) connect(c net.Conn) {
	to, err := firstLine(c)
	if err != nil {
		_ = c.Close()
		return
	}
	d, err := net.Dial("tcp", to) //nolint:noctx // the loopback: refused at once
	if err != nil {
		_ = c.Close()
		return
	}
	faulty := slices.Contains(n.broker, to)
	n.mu.Lock()
	if n.over {
		n.mu.Unlock()
		_, _ = c.Close(), d.Close()
		return
	}
	n.conns[c], n.conns[d] = faulty, faulty
	n.mu.Unlock()
	pass := func() {}
	if faulty {
		pass = n.pass
	}
	carry(c, d, pass)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.conns, c)
	delete(n.conns, d)
}

// firstLine reads the first line, and no byte after it.
func firstLine(c net.Conn) (line string, err error) {
	_ = c.SetReadDeadline(time.Now().Add(askFor))
	defer func() { _ = c.SetReadDeadline(time.Time{}) }()
	for one := make([]byte, 1); ; line += string(one) {
		if _, err := io.ReadFull(c, one); err != nil {
			return "", err
		}
		if one[0] == '\n' {
			return line, nil
		}
	}
}

// carry copies in both directions, and calls pass before each write. An end of the input ends
// its direction; an error breaks both connections.
func carry(a, b net.Conn, pass func()) {
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		both.Go(func() {
			if err := carryOne(way[0], way[1], pass); err != nil {
				reset(a)
				reset(b)
			}
		})
	}
	both.Wait()
	_, _ = a.Close(), b.Close()
}

func carryOne(from, to net.Conn, pass func()) error {
	for buf := make([]byte, chunk); ; {
		k, err := from.Read(buf)
		pass() // delays an end of the input, too
		if k > 0 {
			if _, err := to.Write(buf[:k]); err != nil {
				return err
			}
		}
		switch w, ok := to.(interface{ CloseWrite() error }); {
		case err == nil:
		case errors.Is(err, io.EOF) && ok:
			return w.CloseWrite()
		default:
			return err
		}
	}
}

// reset closes a connection. The other end of a TCP connection sees a broken connection.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

// pass returns when a read may go on.
func (n *network) pass() {
	n.mu.Lock()
	held, late := n.held, n.late
	if held != nil || late {
		n.count++
	}
	n.mu.Unlock()
	if held != nil {
		<-held
	}
	if late {
		time.Sleep(lately)
	}
}

// set begins a delay or a blackhole. With neither it ends the fault, and returns how many reads
// the fault held or made late.
func (n *network) set(late, held bool) (count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.late = late
	switch {
	case held:
		n.held = make(chan struct{})
	case n.held != nil:
		close(n.held)
		n.held = nil
	}
	count, n.count = n.count, 0
	return count
}

// soFar is the number of reads that this fault has held or made late.
func (n *network) soFar() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.count
}

// reset breaks all connections to the broker, and returns their number.
func (n *network) reset() (broken int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c, faulty := range n.conns {
		if faulty {
			reset(c)
			broken++
		}
	}
	return broken / 2
}

// close closes the socket and all connections, and waits for the goroutines.
func (n *network) close() {
	_ = n.l.Close()
	n.set(false, false)
	n.mu.Lock()
	n.over = true
	for c := range n.conns {
		_ = c.Close()
	}
	n.mu.Unlock()
	n.wg.Wait()
}

// A dialer connects through a network's unix socket, or, without a path, directly. It is the
// nats.CustomDialer of the marks.
type dialer struct {
	Path string `json:"path"` // of the unix socket; empty connects directly
}

func (d dialer) DialContext(ctx context.Context, addr string) (net.Conn, error) {
	if d.Path == "" {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}
	c, err := new(net.Dialer).DialContext(ctx, "unix", d.Path)
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintln(c, addr); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (d dialer) Dial(_, addr string) (net.Conn, error) {
	return d.DialContext(context.Background(), addr)
}

// listenAs is the carrier: in a consumer's namespace it listens on the broker's addresses and
// carries their connections, until the process ends.
func (d dialer) listenAs(addrs []string) error {
	for _, addr := range addrs {
		l, err := net.Listen("tcp", addr) //nolint:noctx // the loopback
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					out, err := d.DialContext(context.Background(), addr)
					if err != nil {
						reset(c)
						return
					}
					carry(c, out, func() {})
				}()
			}
		}()
	}
	return nil
}
