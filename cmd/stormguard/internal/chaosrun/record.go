// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/chaos"
)

// record holds the events of the run. The processes report them to two servers. The dependency
// takes the effects, and an outage closes it. The recorder takes the rest, and no fault closes it.
type record struct {
	began time.Time

	mu       sync.Mutex
	effects  []chaos.Effect
	happened map[int]bool
	handled  []chaos.Effect
	failed   []chaos.Effect
	healthy  int // published healthy messages
	found    int // messages that processes found in the spill of the process before
	messages []chaos.Message
}

func newRecord() *record { return &record{began: time.Now(), happened: make(map[int]bool)} }

func (r *record) now() chaos.Instant { return time.Since(r.began) }

// made is the number of messages that had their effect.
func (r *record) made() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.happened)
}

// published adds messages that the broker has. sent is when each was sent, or was due.
func (r *record) published(ms []body, sent []chaos.Instant) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, m := range ms {
		r.messages = append(r.messages, chaos.Message{ID: m.ID, Key: m.Key, Poison: m.Poison, At: sent[i]})
		if !m.Poison {
			r.healthy++
		}
	}
}

// backlog is the number of healthy messages without an effect.
func (r *record) backlog() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.healthy - len(r.happened)
}

// answer executes a line of a process: the command, the process's number, the message's id.
func (r *record) answer(line string) (string, error) {
	words := strings.Fields(line)
	if len(words) != 3 {
		return "", fmt.Errorf("chaos: %.40q is not COMMAND PROCESS ID", line)
	}
	process, err := strconv.Atoi(words[1])
	id, err2 := strconv.Atoi(words[2])
	if err := errors.Join(err, err2); err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e := chaos.Effect{ID: id, Process: process, At: r.now()}
	switch words[0] {
	case "charge":
		r.effects = append(r.effects, e)
		r.happened[id] = true
	case "did":
		if !r.happened[id] {
			return "no", nil
		}
		return "yes", nil
	case "spilled":
		r.found += id
	case "handled":
		r.handled = append(r.handled, e)
	case "failed":
		r.failed = append(r.failed, e)
	default:
		return "", fmt.Errorf("chaos: %.40q is no command", line)
	}
	return "ok", nil
}

// listener answers lines until it is closed. Goroutines: one accepts, one serves each
// connection; down ends them.
type listener struct {
	answer func(line string) (string, error)
	addr   string

	mu    sync.Mutex
	l     net.Listener // nil while down
	conns map[net.Conn]bool
	wg    sync.WaitGroup
}

// serve starts a listener on a port below the range of outgoing connections: while the listener
// is down, no outgoing connection must take its port.
func serve(answer func(string) (string, error)) (s *listener, err error) {
	s = &listener{answer: answer, conns: make(map[net.Conn]bool)}
	for range 100 {
		s.addr = fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(12000))
		if err = s.up(); err == nil {
			return s, nil
		}
	}
	return nil, fmt.Errorf("no free port on the loopback: %w", err)
}

// up listens; after down it uses the same port.
func (s *listener) up() error {
	l, err := net.Listen("tcp", s.addr) //nolint:noctx // loopback
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.l, s.addr = l, l.Addr().String()
	s.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			if s.l != l {
				_ = c.Close()
			} else {
				s.conns[c] = true
				s.wg.Go(func() { s.serve(c) })
			}
			s.mu.Unlock()
		}
	})
	return nil
}

func (s *listener) serve(c net.Conn) {
	defer func() {
		_ = c.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
	for lines := bufio.NewScanner(c); lines.Scan(); {
		a, err := s.answer(lines.Text())
		if err != nil {
			a = "error " + err.Error()
		}
		if _, err := fmt.Fprintln(c, a); err != nil {
			return
		}
	}
}

// down closes the server and all connections.
func (s *listener) down() {
	s.mu.Lock()
	if s.l != nil {
		_ = s.l.Close()
		s.l = nil
	}
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// A client asks a server over one connection. Only one goroutine at a time may use it.
type client struct {
	addr string
	dial dialer
	c    net.Conn
	r    *bufio.Reader
}

// askFor is the time limit for an answer.
const askFor = 10 * time.Second

// errSent is an error after the line was sent: the server may have got it.
var errSent = errors.New("chaos: no answer")

func (c *client) ask(ctx context.Context, format string, args ...any) (string, error) {
	if c.c == nil {
		conn, err := c.dial.DialContext(ctx, c.addr)
		if err != nil {
			return "", err
		}
		c.c, c.r = conn, bufio.NewReader(conn)
	}
	_ = c.c.SetDeadline(time.Now().Add(askFor))
	_, err := fmt.Fprintf(c.c, format+"\n", args...)
	if err == nil {
		var line string
		if line, err = c.r.ReadString('\n'); err == nil {
			return strings.TrimSpace(line), nil
		}
	}
	_ = c.c.Close()
	c.c = nil
	return "", fmt.Errorf("%w: %w", errSent, err)
}
