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

// Dialer says how to connect. [Consume] and [NewDLQ] each make connections of
// their own with it, and make them anew when they break: all endpoints are tried
// in an order that is shuffled each time, then there is a pause, drawn at random
// up to a limit that doubles from 100ms to MaxPause ("full jitter").
type Dialer struct {
	// URLs are the endpoints: "amqp://user:password@host:5672/vhost", amqps for
	// TLS. At least one. They are never logged, only host and port.
	URLs []string

	// Config is the client's. Its Recovery must be nil: the client's own
	// recovery gives old delivery tags a new meaning. Its Dial, if set, should
	// heed deadlines; unset means TCP.
	Config amqp091.Config

	// Timeout bounds one attempt, handshake included. At least 10ms; unset
	// means 10s. RabbitMQ lets a wrong password wait for 3s: below that it is tried
	// for ever.
	Timeout time.Duration

	// MaxPause is the longest pause between two rounds. At least 100ms; unset
	// means 10s.
	MaxPause time.Duration
}

// Dial is a [Dialer] with defaults for these endpoints.
func Dial(urls ...string) Dialer { return Dialer{URLs: urls} }

const (
	minPause       = 100 * time.Millisecond
	defaultTimeout = 10 * time.Second
	closeTimeout   = 5 * time.Second
	// answerTimeout is how long the broker's answer is waited for once ctx has ended.
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
		if _, err := amqp091.ParseURI(u); err != nil { // its text may have the password
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

// close ends the connection within a few seconds, whatever state it is in.
func (l *link) close() {
	_ = l.CloseDeadline(time.Now().Add(closeTimeout))
	l.sock.close()
}

// within does what asks the broker, for which the client waits without limit:
// when there is no answer for patience after ctx has ended, the connection is cut.
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

// socket is the connection below the client, which may wait on it without limit.
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

// once is a round whose errors are one.
func (d Dialer) once(ctx context.Context) (*link, error) {
	l, errs := d.round(ctx)
	return l, errors.Join(errs...)
}

// round tries every endpoint, in a fresh order, until one answers. errs are theirs, or
// that of ctx alone.
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
	stop := context.AfterFunc(ctx, l.sock.close) // the client's handshake knows no context
	defer stop()
	cfg := d.Config
	cfg.TLSClientConfig = cfg.TLSClientConfig.Clone() // the client writes the host's name there,
	cfg.Properties = maps.Clone(cfg.Properties)       // and what it can do here
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
		if deadline, _ := ctx.Deadline(); !time.Now().Before(deadline) { // the client may take it for a refusal
			err = fmt.Errorf("not done in Dialer.Timeout: %w", context.DeadlineExceeded)
		}
		return nil, fmt.Errorf("amqp: connect %s: %w", l.endpoint, err)
	}
	if text, ok := l.Properties["version"].(string); ok {
		l.version = version(text)
	}
	return l, nil
}

// version is the major and minor of a broker's version.
func version(text string) (v [2]int) {
	major, rest, _ := strings.Cut(text, ".")
	minor, _, _ := strings.Cut(rest, ".")
	v[0], _ = strconv.Atoi(major)
	v[1], _ = strconv.Atoi(minor)
	return v
}

// refusals tells when the first connection fails by the configuration's fault.
type refusals struct {
	silent int // rounds in a row in which all endpoints ended as with a wrong password
}

// silentTries is how many rounds in a row must end so: a broker hangs up without a word
// on a wrong password, and so does a network that breaks in the handshake, which the
// client reports as the same error.
const silentTries = 3

// backendFailed is what a broker says that could not ask who may do what.
const backendFailed = "returned an error"

// last tells whether no further round can mend the errors of all endpoints.
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

// saidNo tells whether the broker itself refuses user or vhost, or knows no common way
// to authenticate.
func saidNo(err error) bool {
	said, ok := errors.AsType[*amqp091.Error](err)
	if !ok || !said.Server {
		return errors.Is(err, amqp091.ErrSASL)
	}
	return said.Code == amqp091.AccessRefused && !strings.Contains(said.Reason, backendFailed) ||
		said.Code == amqp091.NotAllowed && !strings.Contains(said.Reason, backendFailed) && !strings.Contains(said.Reason, "limit (") // of connections
}

// pauses are the pauses between rounds.
type pauses struct {
	limit, longest time.Duration
}

// wait pauses; false when ctx ends first.
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

// sparse paces a line that would repeat: at once, a second later, and then at
// distances that double up to a minute.
type sparse struct {
	next  time.Time
	every time.Duration
}

// due tells whether the line is to be written now.
func (s *sparse) due(now time.Time) bool {
	if now.Before(s.next) {
		return false
	}
	s.every = min(max(2*s.every, time.Second), time.Minute)
	s.next = now.Add(s.every)
	return true
}

// connect makes a connection, however long it takes. It fails when ctx ends,
// or, if first, when the broker refuses user, password or vhost.
func (d Dialer) connect(ctx context.Context, first bool, name string, log *slog.Logger) (*link, error) {
	p := pauses{longest: d.withDefaults().MaxPause}
	var failed sparse
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
