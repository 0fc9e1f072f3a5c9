// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// Dialer says how to connect. [Consume], [NewDLQ] and [NewRegister] each make connections of their
// own with it, and new ones when those break. A round tries all endpoints, in an order that is
// shuffled each time. Consume pauses between rounds for a random time, up to a limit that doubles
// from 100ms to MaxPause ("full jitter"). A [DLQ] and a [Register] try one round in each call that
// needs a connection.
type Dialer struct {
	// URLs are the endpoints: "amqp://user:password@host:5672/vhost", amqps for TLS. At least one.
	// Only host and port are ever logged.
	URLs []string

	// Config is the client's configuration. Its Recovery must be nil: the client's own recovery
	// gives old delivery tags a new meaning. Its Dial, if set, should heed deadlines; unset means
	// TCP.
	Config amqp091.Config

	// Timeout bounds one attempt, handshake included. At least 10ms; unset means 10s. RabbitMQ
	// answers a wrong password after 3s: with a lower Timeout, Consume tries it without end.
	Timeout time.Duration

	// MaxPause is the longest pause of Consume between two rounds. At least 100ms; unset means 10s.
	MaxPause time.Duration
}

// Dial returns a [Dialer] for these endpoints, with defaults.
func Dial(urls ...string) Dialer { return Dialer{URLs: urls} }

const (
	minPause       = 100 * time.Millisecond
	defaultTimeout = 10 * time.Second
	closeTimeout   = 5 * time.Second
	// answerTimeout is how long to wait for the broker's answer once ctx has ended.
	answerTimeout = 2 * time.Second
	// stopGrace is how long the connection may take to close after the stop timeout.
	stopGrace = 4 * time.Second
)

func (d Dialer) withDefaults() Dialer {
	if d.Timeout == 0 {
		d.Timeout = defaultTimeout
	}
	if d.MaxPause == 0 {
		d.MaxPause = 10 * time.Second
	}
	return d
}

// Validate reports everything wrong at once.
func (d Dialer) Validate() error {
	e := d.withDefaults()
	var errs []error
	if len(d.URLs) == 0 {
		errs = append(errs, errors.New("amqp: Dialer.URLs: at least one endpoint is needed"))
	}
	for i, u := range d.URLs {
		if _, err := amqp091.ParseURI(u); err != nil { // the error's text may have the password
			errs = append(errs, fmt.Errorf("amqp: Dialer.URLs[%d]: not of the form amqp://user:password@host:port/vhost", i))
		}
	}
	if d.Config.Recovery != nil {
		errs = append(errs, unsuitable("Dialer.Config.Recovery: must be nil: after the client's own recovery an ack of an old delivery acks another message; connections are made anew here"))
	}
	if e.Timeout < 10*time.Millisecond {
		errs = append(errs, fmt.Errorf("amqp: Dialer.Timeout: %s is not at least 10ms", d.Timeout))
	}
	if e.MaxPause < minPause {
		errs = append(errs, fmt.Errorf("amqp: Dialer.MaxPause: %s is not at least %s", d.MaxPause, minPause))
	}
	return errors.Join(errs...)
}

// link is an open connection.
type link struct {
	*amqp091.Connection
	endpoint string // host and port
	sock     *socket
	version  [2]int // the broker's, major and minor; 0 if it does not say
}

// close ends the connection within a few seconds, whatever its state.
func (l *link) close() {
	_ = l.CloseDeadline(time.Now().Add(closeTimeout))
	l.sock.close()
}

// within calls do, which asks the broker: the client waits for an answer without limit. If there is
// none for patience after ctx has ended, within cuts the connection.
func (l *link) within(ctx context.Context, patience time.Duration, do func() error) error {
	done := make(chan struct{})
	defer close(done)
	stop := context.AfterFunc(ctx, func() {
		wait := time.NewTimer(patience)
		defer wait.Stop()
		select {
		case <-wait.C:
			l.sock.close()
		case <-done:
		}
	})
	defer stop()
	return do()
}

// socket is the network connection below the client, which may wait on it without limit.
type socket struct {
	mu   sync.Mutex
	conn net.Conn
}

func (s *socket) set(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn = c
}

func (s *socket) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil {
		_ = s.conn.Close()
	}
}

// once is round with its errors joined.
func (d Dialer) once(ctx context.Context) (*link, error) {
	l, errs := d.round(ctx)
	return l, errors.Join(errs...)
}

// round tries every endpoint, in a new random order, until one answers. errs has the error of each,
// or that of ctx alone.
func (d Dialer) round(ctx context.Context) (l *link, errs []error) {
	d = d.withDefaults()
	for _, i := range rand.Perm(len(d.URLs)) {
		l, err := d.dial(ctx, d.URLs[i])
		if err == nil {
			return l, nil
		}
		if ctx.Err() != nil {
			return nil, []error{ctx.Err()}
		}
		errs = append(errs, err)
	}
	return nil, errs
}

func (d Dialer) dial(ctx context.Context, url string) (*link, error) {
	uri, err := amqp091.ParseURI(url)
	if err != nil {
		return nil, errors.New("amqp: dial: the URL cannot be read") // see Validate
	}
	l := &link{endpoint: net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port)), sock: new(socket)}
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	stop := context.AfterFunc(ctx, l.sock.close) // the client's handshake takes no context
	defer stop()
	cfg := d.Config
	cfg.TLSClientConfig = cfg.TLSClientConfig.Clone() // a copy, because the client writes the host's name there
	cfg.Properties = maps.Clone(cfg.Properties)       // a copy, because the client writes its capabilities there
	under := cfg.Dial
	if under == nil {
		under = func(network, addr string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, addr)
		}
	}
	cfg.Dial = func(network, addr string) (net.Conn, error) {
		c, err := under(network, addr)
		if err != nil {
			return nil, err
		}
		l.sock.set(c)
		if ctx.Err() != nil {
			l.sock.close()
		}
		deadline, _ := ctx.Deadline()
		return c, c.SetDeadline(deadline) // the client clears it after the handshake
	}
	if l.Connection, err = amqp091.DialConfig(url, cfg); err != nil {
		l.sock.close()
		if deadline, _ := ctx.Deadline(); !time.Now().Before(deadline) { // the client may take the timeout for a refusal
			err = fmt.Errorf("not done in Dialer.Timeout: %w", context.DeadlineExceeded)
		}
		return nil, fmt.Errorf("amqp: connect %s: %w", l.endpoint, err)
	}
	if text, ok := l.Properties["version"].(string); ok {
		l.version = version(text)
	}
	return l, nil
}

// version returns major and minor of a broker's version.
func version(text string) (v [2]int) {
	major, rest, _ := strings.Cut(text, ".")
	minor, _, _ := strings.Cut(rest, ".")
	v[0], _ = strconv.Atoi(major)
	v[1], _ = strconv.Atoi(minor)
	return v
}

// refusals tells whether the first connection fails because of the configuration.
type refusals struct {
	silent int // rounds in a row in which all endpoints ended as after a wrong password
}

// silentTries is after how many such rounds in a row the password counts as wrong. A broker hangs
// up without an answer on a wrong password, and so does a network that breaks in the handshake. The
// client reports both as the same error.
const silentTries = 3

// backendFailed is in the refusal of a broker that could not ask its backend for permissions.
const backendFailed = "returned an error"

// last tells whether no further round can help, by the errors of all endpoints.
func (r *refusals) last(round []error) bool {
	said := 0
	for _, err := range round {
		switch {
		case saidNo(err):
			said++
		case !errors.Is(err, amqp091.ErrCredentials) && !errors.Is(err, amqp091.ErrVhost):
			r.silent = 0
			return false
		}
	}
	r.silent++
	return said == len(round) || r.silent >= silentTries
}

// saidNo tells whether the broker itself refuses user or vhost, or has no common way to
// authenticate.
func saidNo(err error) bool {
	said, ok := errors.AsType[*amqp091.Error](err)
	if !ok || !said.Server {
		return errors.Is(err, amqp091.ErrSASL)
	}
	return said.Code == amqp091.AccessRefused && !strings.Contains(said.Reason, backendFailed) ||
		said.Code == amqp091.NotAllowed && !strings.Contains(said.Reason, backendFailed) && !strings.Contains(said.Reason, "limit (") // a limit of connections is no refusal
}

// pauses are the pauses between rounds.
type pauses struct {
	limit, longest time.Duration
}

// wait pauses; it returns false when ctx ends first.
func (p *pauses) wait(ctx context.Context) bool {
	p.limit = min(max(2*p.limit, minPause), p.longest)
	timer := time.NewTimer(rand.N(p.limit) + 1)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// logPacer paces a log line that would repeat. The line is due at once, a second later, and then at
// intervals that double up to a minute.
type logPacer struct {
	next  time.Time
	every time.Duration
}

// due tells whether the line is to be written now.
func (s *logPacer) due(now time.Time) bool {
	if now.Before(s.next) {
		return false
	}
	s.every = min(max(2*s.every, time.Second), time.Minute)
	s.next = now.Add(s.every)
	return true
}

// connect makes a connection, however long it takes. It fails when ctx ends. If first is set, it
// also fails when the broker refuses user, password or vhost.
func (d Dialer) connect(ctx context.Context, first bool, name string, log *slog.Logger) (*link, error) {
	p := pauses{longest: d.withDefaults().MaxPause}
	var failed logPacer
	var refused refusals
	for {
		l, errs := d.round(ctx)
		if l != nil {
			log.Info("connected", "source", name, "endpoint", l.endpoint)
			return l, nil
		}
		err := errors.Join(errs...)
		if ctx.Err() != nil || first && refused.last(errs) {
			return nil, err
		}
		if failed.due(time.Now()) {
			log.Warn("not connected", "source", name, "error", err)
		}
		if !p.wait(ctx) {
			return nil, ctx.Err()
		}
	}
}
