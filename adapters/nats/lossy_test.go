// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// frame is what a client publishes.
type frame struct {
	subject string
	body    string // behind the headers
}

func (f frame) pull() bool     { return strings.HasPrefix(f.subject, "$JS.API.CONSUMER.MSG.NEXT.") }
func (f frame) progress() bool { return f.body == "+WPI" }

// lossy is a TCP proxy in front of the broker, which loses what a test says of
// what clients publish. Neither side hears of that.
type lossy struct {
	to string
	l  net.Listener
	wg sync.WaitGroup

	mu    sync.Mutex
	loses func(frame) bool
	conns []net.Conn
	ended bool
}

// freeze stops the connections that there are, both ways, without a word to either
// side. New ones are let through.
func (p *lossy) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.(*proxied).frozen.Store(true)
	}
}

// proxied is a side of a connection. While it is frozen, what is written to it waits
// for its end.
type proxied struct {
	net.Conn
	frozen atomic.Bool
	once   sync.Once
	closed chan struct{}
}

func (c *proxied) Write(b []byte) (int, error) {
	if c.frozen.Load() {
		<-c.closed
	}
	return c.Conn.Write(b)
}

func (c *proxied) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// lossy starts a proxy that loses what loses says; that is called for one frame
// at a time.
func (b *broker) lossy(t testing.TB, loses func(frame) bool) *lossy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &lossy{to: fmt.Sprintf("127.0.0.1:%d", b.port), l: l, loses: loses}
	p.wg.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// consumer is the rig's, over a connection of its own through the proxy.
func (p *lossy) consumer(t testing.TB) jetstream.Consumer {
	t.Helper()
	nc, err := nats.Connect("nats://"+p.l.Addr().String(), nats.MaxReconnects(-1), nats.IgnoreDiscoveredServers(), nats.Timeout(connectTimeout))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	c, err := js.Consumer(adaptertest.Context(t), "S", "C")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (p *lossy) close() {
	_ = p.l.Close()
	p.mu.Lock()
	p.ended = true
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// keep closes a connection with the proxy; false when that is closed already.
func (p *lossy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		_ = c.Close()
		return false
	}
	p.conns = append(p.conns, c)
	return true
}

func (p *lossy) accept() {
	for {
		from, err := p.l.Accept()
		if err != nil {
			return
		}
		to, err := net.Dial("tcp", p.to)
		if err != nil {
			_ = from.Close()
			continue
		}
		client, server := &proxied{Conn: from, closed: make(chan struct{})}, &proxied{Conn: to, closed: make(chan struct{})}
		if !p.keep(client) || !p.keep(server) {
			return
		}
		p.wg.Go(func() {
			_, _ = io.Copy(client, server)
			_ = client.Close()
		})
		p.wg.Go(func() {
			_ = p.relay(client, server)
			_ = server.Close()
		})
	}
}

// relay passes on what the client sends, less what is lost.
func (p *lossy) relay(client io.Reader, server io.Writer) error {
	r := bufio.NewReader(client)
	for {
		sent, f, err := readFrame(r)
		if err != nil {
			return err
		}
		if f != (frame{}) && p.lost(f) {
			continue
		}
		if _, err := server.Write(sent); err != nil {
			return err
		}
	}
}

func (p *lossy) lost(f frame) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.loses(f)
}

// readFrame reads one step of NATS's client protocol: its bytes, and what they
// publish, if they do.
//
//	PUB subject [reply] size␍␊payload␍␊
//	HPUB subject [reply] headersize size␍␊headers payload␍␊
func readFrame(r *bufio.Reader) (sent []byte, f frame, err error) {
	sent, err = r.ReadBytes('\n')
	if err != nil {
		return nil, frame{}, err
	}
	args := strings.Fields(string(sent))
	if len(args) < 3 || args[0] != "PUB" && args[0] != "HPUB" {
		return sent, frame{}, nil
	}
	size, err := strconv.Atoi(args[len(args)-1])
	if err != nil {
		return nil, frame{}, err
	}
	head := 0
	if args[0] == "HPUB" {
		if head, err = strconv.Atoi(args[len(args)-2]); err != nil {
			return nil, frame{}, err
		}
	}
	payload := make([]byte, size+len("\r\n"))
	if _, err := io.ReadFull(r, payload); err != nil {
		return nil, frame{}, err
	}
	return append(sent, payload...), frame{subject: args[1], body: string(bytes.TrimSuffix(payload[head:], []byte("\r\n")))}, nil
}
