// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// A Kind of broker; empty means [NATS].
type Kind string

// The brokers that a demo can run on.
const (
	Kafka    Kind = "kafka"
	NATS     Kind = "nats"
	RabbitMQ Kind = "rabbitmq"
)

// Kinds returns all kinds, sorted by name.
func Kinds() []Kind { return slices.Sorted(maps.Keys(platforms)) }

// inFlight is the most unsettled messages of a consumer, on both sides, if the
// broker bounds them. It is also the default of nats.go's Consume.
const inFlight = 500

// maxDeliver is how often the unguarded side tries a message at most.
const maxDeliver = 5

// lettersInFlight is the most unconfirmed dead letters of an unguarded side that
// does not wait for each confirmation. It is less than the clients' buffers.
const lettersInFlight = 100

// stopTimeout is the time limit for stopping a consumer.
const stopTimeout = 5 * time.Second

// handler is the work that both sides do for the body of a message.
type handler func(ctx context.Context, body []byte) error

// broker is the broker of both runs of a demo.
type broker interface {
	// lay makes a run's queues; id keeps their names apart from all others. The
	// caller removes a non-nil plumbing, also after an error.
	lay(ctx context.Context, id string) (plumbing, error)
	close()
}

// plumbing is the queues and connections of one run. joined, idle, buried and
// exhume may run concurrently with each other, but not with themselves.
type plumbing interface {
	// send publishes a message; one goroutine calls it. It blocks only while the
	// client's buffer is full. wait, called once, returns nil when the broker has
	// the message.
	send(ctx context.Context, body []byte) (wait func(context.Context) error, err error)
	// unguarded consumes as most programs do; guarded consumes through the guard,
	// with its dead letters. Each calls handle for one message after the other
	// until ctx ends.
	unguarded(ctx context.Context, handle handler) error
	guarded(ctx context.Context, g *guard.Guard, handle handler) error
	// joined tells whether the broker knows a consumer.
	joined(ctx context.Context) (bool, error)
	// idle tells whether the broker, as far as it knows, has no message left to
	// deliver or to settle.
	idle(ctx context.Context) (bool, error)
	// buried is the number of messages in the DLQ; exhume reads them.
	buried(ctx context.Context) (int, error)
	exhume(ctx context.Context, start time.Time) ([]dead, error)
	// remove deletes the queues and closes the connections, also when ctx has
	// ended.
	remove(ctx context.Context)
}

// platform is a kind of broker.
type platform struct {
	title              string
	store              string // the broker's word for the place where messages wait
	unguarded, guarded string // how each side consumes, in one line for people
	address            string // the form of --url, in words
	check              func(address string) bool
	open               func(ctx context.Context, cfg Config, address string, a *access.Access) (broker, error)
	found              brokers.Kind // found or started without an address; empty: open needs no address
}

var platforms = map[Kind]platform{Kafka: onKafka, NATS: onNATS, RabbitMQ: onRabbitMQ}

// platform is the platform of the broker's kind; zero for a kind that Validate
// refuses.
func (c Config) platform() platform { return platforms[c.kind()] }

// Validate reports all errors of address, Creds, Access and Errors, or else an unknown
// broker. It names the command's flags, not the fields.
func (c Config) Validate() error {
	if !slices.Contains(Kinds(), c.kind()) {
		return fmt.Errorf("--broker %q: must be one of %q", c.Broker, Kinds())
	}
	var errs []error
	if p := c.platform(); c.URL != "" && !p.check(c.URL) {
		errs = append(errs, fmt.Errorf("--url %q: must be %s for --broker %s", access.Redact(c.URL), p.address, c.kind()))
	}
	if c.Creds != "" && (c.URL == "" || c.kind() != NATS) {
		errs = append(errs, fmt.Errorf("--creds %q: needs --broker nats and --url, nothing else asks for a file", c.Creds))
	}
	if !slices.Contains(Failures(), c.failure()) {
		errs = append(errs, fmt.Errorf("--errors %q: must be one of %q", c.Errors, Failures()))
	}
	switch {
	case c.Access.Any() && c.URL == "":
		errs = append(errs, errors.New("--tls, --ca, --cert, --user, --sasl: need --url, the demo's own brokers want none of them"))
	case c.Access.WantsTLS() && strings.HasPrefix(c.URL, "amqp://"):
		errs = append(errs, errors.New("--tls, --ca, --cert: need amqps:// in --url"))
	}
	errs = append(errs, c.Access.Validate(c.kind() == Kafka))
	return errors.Join(errs...)
}

// Addresses returns the forms of Config.URL, of all kinds, in words.
func Addresses() string {
	var all []string
	for _, k := range Kinds() {
		all = append(all, Config{Broker: k}.platform().address)
	}
	return strings.Join(all, ", ")
}

func (c Config) kind() Kind {
	if c.Broker == "" {
		return NATS
	}
	return c.Broker
}

// open connects to the broker of cfg. Without an address it finds or starts one.
func open(ctx context.Context, cfg Config, stderr io.Writer) (broker, error) {
	p := cfg.platform()
	a, err := cfg.Access.Open()
	if err != nil {
		return nil, err
	}
	address := cfg.URL
	if address == "" && p.found != "" {
		fmt.Fprintf(stderr, "looking for %s, or starting it; the very first start installs it and takes minutes\n", p.title)
		if address, err = brokers.Find(ctx, p.found); err != nil {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, fmt.Errorf("no %s to run on; give the address of one by --url, %s: %w", p.title, p.address, err)
		}
		fmt.Fprintf(stderr, "%s at %s; it keeps running, \"scripts/brokers stop %s\" ends one that was started here\n", p.title, access.Redact(address), p.found)
	}
	return p.open(ctx, cfg, address, a)
}
