// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// Config has an operator's settings for a [Guard]. The zero value is valid and means
// the documented defaults.
type Config struct {
	// Group names the group of consumers that this process belongs to: the
	// consumer group, or the durable. It is the coarsest scope of the breaker.
	// Unset means "default".
	Group string

	// Policy applies to each source without a policy of its own.
	Policy Policy

	// StateDir is the directory for the state that must survive a restart: DLQ budgets,
	// breakers, operators' pauses, the Guard's own quarantine, and the failures of
	// unsettled messages. It must be on a local disk, and no other Guard may use it. Its
	// parent directory must exist. Unset means that no state survives a restart.
	StateDir string

	// SpillDir is the directory for [Policy.Spill]. The rules of StateDir apply, and it
	// must be another directory. Unset means that no message is ever written to a disk.
	SpillDir string
	// SpillBytes bounds the messages in SpillDir, 64 KiB to 1 TiB; unset means 1 GiB. The
	// file may become 2.5 times as large.
	SpillBytes int64

	// Scope is what one breaker counts over: a partition (default), a topic or
	// queue with all its partitions, or all sources of this Guard. An open breaker
	// holds every source that it counts over.
	Scope Scope

	// Quorum is the share of a scope's children (partitions of a topic, topics
	// of a group) that must be open before the scope holds all of them, in
	// (0, 1]; unset means 0.5. At least two children must be open. Quorum matters
	// only for scopes wider than Scope: the others have no children.
	Quorum float64
}

// Scope is what a breaker counts over.
type Scope uint8

// The scopes.
const (
	ScopePartition Scope = iota // each source; a source without a partition counts as ScopeTopic
	ScopeTopic                  // the sources of one [SourceConfig.Destination]: all partitions of a topic
	ScopeGroup                  // all sources of the Guard
)

var scopeNames = [...]string{"partition", "topic", "group"}

// String is the scope's word in configuration and logs.
func (s Scope) String() string {
	if int(s) < len(scopeNames) {
		return scopeNames[s]
	}
	return fmt.Sprintf("Scope(%d)", uint8(s))
}

// MarshalText writes "partition", "topic" or "group".
func (s Scope) MarshalText() ([]byte, error) {
	if int(s) >= len(scopeNames) {
		return nil, fmt.Errorf("guard: Scope: %d is none of partition, topic, group", uint8(s))
	}
	return []byte(scopeNames[s]), nil
}

// UnmarshalText reads "partition", "topic" or "group".
func (s *Scope) UnmarshalText(text []byte) error {
	for i, name := range scopeNames {
		if string(text) == name {
			*s = Scope(i)
			return nil
		}
	}
	return fmt.Errorf("guard: Scope: %q is none of partition, topic, group", text)
}

// Policy is how a source behaves. The zero value is valid and means the
// documented defaults. Timeout, NoTimeout, Retry, Ramp, Window and WindowBytes may
// be changed while a source runs, see [Source.Update].
type Policy struct {
	// Order says which messages are handled in sequence: those of the source
	// (default), those of each key, or none.
	Order Order

	// StrictOrder forbids the guard to try a message behind a failing one. Such a try
	// tells poison from an outage within seconds. Its cost: when a dependency comes back,
	// one message may be handled before those in front of it. With StrictOrder the guard
	// has only the class of an error, other lanes, a health check and guesses. Each poison
	// message of unknown class then holds its lane for 11 to 14 min.
	StrictOrder bool

	// Workers is how many handlers of one source may run at once, from 1 to
	// 1024; unset means 1. More than 1 needs [OrderKey] or [OrderNone]. In the
	// passive shape it is how many messages the program may have at once.
	Workers int

	// Window is how many messages of a source may be unsettled in this process,
	// held messages included, from 1 to 1 Mi; unset means 1024, or the broker's
	// [Limits.MaxUnacked] if that is less. A full window stops intake.
	//
	// If an adapter reads on a goroutine of its own ([Source.Feed]), half of the window
	// is for messages between that goroutine and the source: less if the workers need
	// more, but at least 2. A window of 1 or 2 then counts as 3. If Workers equals
	// Window, two workers stay idle.
	//
	// If the broker keeps only a low watermark (a [Marker]), messages that were
	// settled behind an unsettled one count, too. So with [OrderKey] or [OrderNone]
	// at most Window messages pass a message that waits for a retry.
	Window int

	// WindowBytes bounds the same messages by [Port.Size]; unset means 64 MiB. A single
	// larger message is let in while no other is here. A message's failure history
	// counts, too: about 2 KB, or 20 KB with long error texts or stacks. Histories only
	// stop intake, and only while more than 64 messages are here: messages that are here
	// may fail again, and the next message may prove that the dependency works.
	WindowBytes int64

	// Spill lets a source on hold write its messages to [Config.SpillDir] and ack them, so
	// that the broker need not keep them until the hold is over. It begins when the window
	// is full, or the oldest message has waited for 10s. Spilled messages are handled
	// first, in their order, also after a restart. After its ack a message is only on this
	// host's disk; messages that another process gets meanwhile may be handled before it.
	// Spill needs a port that is a [Spiller]. With a [Keeper], which has no broker behind
	// it, each message goes to the disk first.
	Spill bool

	// Timeout is how long a handler may run before its context ends, to within 10ms;
	// 20ms to 24h, unset means 30s.
	Timeout time.Duration
	// NoTimeout lets handlers run without a limit. A hanging handler then shows only in
	// the breaker's slow rule, a hanging function of [Protect] only in
	// Account.Processing.
	NoTimeout bool

	Retry Retry
	Ramp  Ramp

	// Breaker configures the scope's breaker. If its Slow is unset, it is Timeout, but at
	// most two thirds of its Window.
	Breaker breaker.Config
	// NoBreaker leaves the breaker out. Then messages are not held in an outage: only the
	// storm detector and the DLQ budget limit dead letters.
	NoBreaker bool

	// Storm has the three thresholds of a storm.
	Storm dlq.StormConfig

	// Budget bounds the number of dead letters.
	Budget dlq.BudgetConfig
}

// Order is what a source handles in sequence.
type Order uint8

// The orders.
const (
	OrderSource Order = iota // all messages of the source, one after the other
	OrderKey                 // the messages of each [Port.Lane], one after the other
	OrderNone                // in any order, as workers become free
)

var orderNames = [...]string{"source", "key", "none"}

// String is the order's word in configuration and logs.
func (o Order) String() string {
	if int(o) < len(orderNames) {
		return orderNames[o]
	}
	return fmt.Sprintf("Order(%d)", uint8(o))
}

// MarshalText writes "source", "key" or "none".
func (o Order) MarshalText() ([]byte, error) {
	if int(o) >= len(orderNames) {
		return nil, fmt.Errorf("guard: Order: %d is none of source, key, none", uint8(o))
	}
	return []byte(orderNames[o]), nil
}

// UnmarshalText reads "source", "key" or "none".
func (o *Order) UnmarshalText(text []byte) error {
	for i, name := range orderNames {
		if string(text) == name {
			*o = Order(i)
			return nil
		}
	}
	return fmt.Errorf("guard: Order: %q is none of source, key, none", text)
}

// Retry says how often and how soon a failed message is handled again. No worker waits
// for a retry: the message is put aside, and blocks only the messages behind it in its
// order.
type Retry struct {
	// Attempts is how many handler calls a message gets before it may be
	// dead-lettered, from 1 to 1000; unset means 5. Failed probes of a breaker
	// are not counted.
	Attempts int

	// Base and Max bound the delay before the n-th retry: a random time up to
	// min(Max, Base·2^(n-1)) ("full jitter"). Unset means 50ms and 10s.
	Base, Max time.Duration

	// Patience is how long a source must be silent before a guess: the guard takes a
	// message whose attempts are used up for poison, without proof. It guesses only if
	// all messages here have failed: on an idle source nothing else can tell poison
	// from an outage. Unset means 10s. Patience doubles for each other failing message,
	// up to a factor of 64, and for each guess until something succeeds. A parked
	// message ([Parker]) is no guess here, but the next guess waits for Patience.
	Patience time.Duration
}

// Ramp limits how fast held messages are handled after a hold. The rate starts at
// Start and doubles every Double; after For there is no limit. In the first t
// it admits Start·Double/ln 2·(2^(t/Double)−1) messages, at most one more.
type Ramp struct {
	Start  float64       // messages per second; unset means 100
	Double time.Duration // unset means 1s
	For    time.Duration // unset means 10s
	Off    bool          // drain at full speed
}

// WithDefaults fills unset fields.
func (r Ramp) WithDefaults() Ramp {
	def(&r.Start, 100.0)
	def(&r.Double, time.Second)
	def(&r.For, 10*time.Second)
	return r
}

// At is the time from the first message until the n-th after it may go: the inverse of
// the integral of the rate. All fields must be set.
func (r Ramp) At(n float64) time.Duration {
	tau := r.Double.Seconds() / math.Ln2
	s := tau * math.Log1p(n/(r.Start*tau))
	return time.Duration(s * float64(time.Second))
}

// SourceConfig describes one source to [Open].
type SourceConfig struct {
	// Name is the source's name in states, metrics and logs, such as "orders/0".
	// It must not be empty, and is unique among the open sources of a Guard.
	Name string

	// System and Destination are messaging.system and
	// messaging.destination.name of the OTel conventions; Partition is
	// messaging.destination.partition.id, empty where there is none.
	System, Destination, Partition string

	// DeadLetters writes dead letters. If it is nil, nothing is ever dead-lettered:
	// messages that should be wait, with the reason "dlq". Sources that share a
	// writer share the goroutine that calls it.
	DeadLetters dlq.Writer

	// Policy overrides the Guard's; nil means the Guard's.
	Policy *Policy

	// Limiter paces admissions; nil means no limit.
	Limiter Limiter
}

// A Limiter paces admissions. Admit takes one admission and returns 0. If there is none,
// it returns how long to wait before the next call (more than 0; more than 1 h counts as
// 1 h). A source calls Admit for each message, under its lock: it must do no I/O and must
// not wait. It must be safe for concurrent use: the callers of a [Func] share a Limiter,
// sources may share one, and all sources of a Guard share [WithDeadLetterLimiter]'s.
type Limiter interface {
	Admit(now time.Duration) (wait time.Duration)
}

// An Option gives [New] a dependency that a config file cannot express.
type Option func(*Guard)

// WithLogger sets the logger. It gets changes of state, never messages; docs/operating.md
// lists the lines. A nil logger is refused; slog.New(slog.DiscardHandler) is silent. The
// default is the [slog.Default] at the time of [New]. It gets only lines at WARN or above,
// and the lines that end a warning.
func WithLogger(log *slog.Logger) Option { return func(g *Guard) { g.log, g.ends = log, log } }

// WithMeterProvider sets where metrics go; the default is OTel's global provider.
func WithMeterProvider(p metric.MeterProvider) Option { return func(g *Guard) { g.meters = p } }

// WithTracerProvider turns on a span for each handler call, linked to the
// message's own trace context if [WithPropagator] is set too. The default is
// none: a span costs more than the rest of the guard.
func WithTracerProvider(p trace.TracerProvider) Option { return func(g *Guard) { g.traces = p } }

// WithPropagator reads trace context from message headers, and writes it into
// dead letters. The default is none: headers are then never parsed.
func WithPropagator(p propagation.TextMapPropagator) Option {
	return func(g *Guard) { g.propagator = p }
}

// WithParentSpans makes a handler call's span a child of the span that sent the
// message, so that both are one trace. The default is a link, as the messaging
// conventions ask for: a message may be handled long after it was sent, or twice.
func WithParentSpans() Option { return func(g *Guard) { g.parents = true } }

// WithSeed fixes the random jitter of retries, probes and dead-letter writes, so that a
// simulation can be replayed. The default is a random seed for each Guard.
func WithSeed(seed uint64) Option { return func(g *Guard) { g.seed = seed } }

const (
	defaultWindow      = 1024
	maxWindow          = 1 << 20
	defaultWindowBytes = 64 << 20
	defaultTimeout     = 30 * time.Second
	maxWorkers         = 1024
)

// problems collects everything wrong with a configuration.
type problems []error

func (p *problems) addf(format string, args ...any) {
	*p = append(*p, fmt.Errorf("guard: "+format, args...))
}

func (p *problems) within(field string, v, low, high time.Duration) {
	if v < low || v > high {
		p.addf("%s: %s is not within %s and %s", field, v, low, high)
	}
}

// Validate reports all problems at once; nil means that [New] accepts the Config.
func (c Config) Validate() error {
	var p problems
	if int(c.Scope) >= len(scopeNames) {
		p.addf("Config.Scope: %d is none of partition, topic, group", uint8(c.Scope))
	}
	if c.StateDir != "" && c.SpillDir != "" && filepath.Clean(c.StateDir) == filepath.Clean(c.SpillDir) {
		p.addf("Config.StateDir: %q is Config.SpillDir, too; each needs one of its own", c.StateDir)
	}
	if c.Policy.Spill && c.SpillDir == "" {
		p.addf("Config.SpillDir: must be set with Policy.Spill")
	}
	if c.SpillBytes != 0 && (c.SpillBytes < 64<<10 || c.SpillBytes > 1<<40) {
		p.addf("Config.SpillBytes: %d is not within 65536 (64 KiB) and 1099511627776 (1 TiB)", c.SpillBytes)
	}
	if math.IsNaN(c.Quorum) || c.Quorum < 0 || c.Quorum > 1 {
		p.addf("Config.Quorum: %v is not within (0, 1]", c.Quorum)
	}
	return errors.Join(append(p, c.Policy.Validate())...)
}

// Validate reports all problems at once. [Open] checks the Policy against the broker's
// [Limits].
func (c Policy) Validate() error {
	d := c.withDefaults(Limits{})
	var p problems
	if int(c.Order) >= len(orderNames) {
		p.addf("Policy.Order: %d is none of source, key, none", uint8(c.Order))
	}
	if d.Workers < 1 || d.Workers > maxWorkers {
		p.addf("Policy.Workers: %d is not within 1 and %d", c.Workers, maxWorkers)
	}
	if d.Workers > 1 && c.Order == OrderSource {
		p.addf("Policy.Workers: %d workers cannot keep the order of a source; use order key or none, or 1 worker", c.Workers)
	}
	if d.Window < 1 || d.Window > maxWindow {
		p.addf("Policy.Window: %d is not within 1 and %d", c.Window, maxWindow)
	}
	if d.Workers > d.Window {
		p.addf("Policy.Workers: %d is more than the window of %d", c.Workers, d.Window)
	}
	if d.WindowBytes < 1 {
		p.addf("Policy.WindowBytes: %d is not above 0", c.WindowBytes)
	}
	if !c.NoTimeout {
		p.within("Policy.Timeout", d.Timeout, 20*time.Millisecond, 24*time.Hour)
	}
	if d.Retry.Attempts < 1 || d.Retry.Attempts > 1000 {
		p.addf("Policy.Retry.Attempts: %d is not within 1 and 1000", c.Retry.Attempts)
	}
	p.within("Policy.Retry.Base", d.Retry.Base, time.Millisecond, time.Hour)
	p.within("Policy.Retry.Max", d.Retry.Max, d.Retry.Base, 24*time.Hour)
	p.within("Policy.Retry.Patience", d.Retry.Patience, time.Millisecond, 24*time.Hour)
	if !c.Ramp.Off {
		if !(d.Ramp.Start >= 1e-3 && d.Ramp.Start <= 1e9) {
			p.addf("Policy.Ramp.Start: %v is not within 0.001 and 1e9 messages per second", c.Ramp.Start)
		}
		p.within("Policy.Ramp.Double", d.Ramp.Double, time.Millisecond, time.Hour)
		p.within("Policy.Ramp.For", d.Ramp.For, 0, 24*time.Hour)
	}
	// The breaker's settings are checked with NoBreaker, too: the Guard makes its scopes
	// from them, for sources with a policy of their own.
	return errors.Join(append(p, c.Storm.Validate(), c.Breaker.Validate(), d.Budget.Validate(d.stormRate()))...)
}

// stormRate is the error rate that the DLQ budget must withstand, 0 for the detector's
// default. A budget that is off fits any rate.
func (c Policy) stormRate() float64 {
	if c.Budget.Off {
		return 0
	}
	return c.Storm.ErrorRate
}

// lease is how long the call of a probe may last. It is longer than Timeout and than
// Breaker.Slow: otherwise a healthy handler of long jobs would never close its breaker.
func (c Policy) lease() time.Duration { return max(c.Timeout, c.Breaker.Slow) + 10*time.Second }

// withDefaults fills unset fields, within the broker's limits.
func (c Policy) withDefaults(l Limits) Policy {
	def(&c.Workers, 1)
	if c.Window == 0 {
		c.Window = defaultWindow
		if l.MaxUnacked > 0 {
			c.Window = min(c.Window, l.MaxUnacked)
		}
	}
	def(&c.WindowBytes, int64(defaultWindowBytes))
	if c.NoTimeout {
		c.Timeout = 0
	} else {
		def(&c.Timeout, defaultTimeout)
	}
	def(&c.Retry.Attempts, 5)
	def(&c.Retry.Base, 50*time.Millisecond)
	def(&c.Retry.Max, max(10*time.Second, c.Retry.Base))
	def(&c.Retry.Patience, 10*time.Second)
	c.Ramp = c.Ramp.WithDefaults()
	if c.Budget.Off {
		c.Budget = dlq.BudgetConfig{Off: true} // its other settings are without effect
	}
	return c
}

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// fits reports every setting that the broker's limits make impossible.
func (c Policy) fits(l Limits) error {
	var p problems
	if l.MaxUnacked > 0 && c.Window > l.MaxUnacked {
		p.addf("Policy.Window: %d is more than the %d messages the broker leaves unsettled", c.Window, l.MaxUnacked)
	}
	if l.AckWait > 0 && l.AckWait < minAckWait {
		p.addf("Limits.AckWait: %s is too short to be extended in time; at least %s", l.AckWait, minAckWait)
	}
	for _, bound := range []struct {
		name string
		max  time.Duration
	}{{"HoldMax", l.HoldMax}, {"RevokeGrace", l.RevokeGrace}} {
		if bound.max <= 0 {
			continue
		}
		switch {
		case c.Timeout == 0:
			p.addf("Policy.NoTimeout: the broker's %s of %s needs a handler timeout", bound.name, bound.max)
		case c.Timeout > bound.max:
			p.addf("Policy.Timeout: %s is more than the broker's %s of %s", c.Timeout, bound.name, bound.max)
		}
	}
	return errors.Join(p...)
}

// minAckWait leaves room for three extensions and the sweeper's tick.
const minAckWait = 300 * time.Millisecond
