// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

const scopeName = "github.com/stormguard-mq/stormguard/guard"

// The metrics. docs/metrics.md lists them, and a test compares the two lists.
const (
	metricConsumed    = "messaging.client.consumed.messages"
	metricHandled     = "stormguard.handled"
	metricReturned    = "stormguard.returned"
	metricMessages    = "stormguard.messages"
	metricUsed        = "stormguard.window.used"
	metricRetries     = "stormguard.retries"
	metricRefused     = "stormguard.refused"
	metricQuarantined = "stormguard.quarantined"
	metricAckFailures = "stormguard.ack.failures"
	metricHoldAge     = "stormguard.hold.age"
	metricHold        = "stormguard.hold.active"
	metricBreaker     = "stormguard.breaker.state"
	metricBudget      = "stormguard.budget.balance"
	metricLag         = "stormguard.lag"
	metricParked      = "stormguard.parked"
	metricParkedTotal = "stormguard.parked.total"
	metricFollowed    = "stormguard.followed"
	metricSpilled     = "stormguard.spilled"

	metricProcess     = "stormguard.process.duration.sampled"
	metricFailures    = "stormguard.failures"
	metricDeadLetters = "stormguard.dead_letters"
	metricDLQRatio    = "stormguard.dlq.ratio"
	metricOvertaken   = "stormguard.overtaken"
	metricRecovery    = "stormguard.recovery.duration"
	metricTransitions = "stormguard.breaker.transitions"
	metricStorms      = "stormguard.storms"
	metricWrite       = "stormguard.dlq.write.duration"
	metricDependency  = "stormguard.dependency.calls"

	metricFleetScope  = "stormguard.fleet.scope"
	metricFleetHeard  = "stormguard.fleet.heard"
	metricFleetQuorum = "stormguard.fleet.quorum"
	metricFleetStorm  = "stormguard.fleet.storm"
)

// sampleOneIn is how many messages of a source there are for each message whose calls are
// timed: two readings of the clock would double the cost of the closed path.
const sampleOneIn = 64

// The bucket boundaries, in seconds. They are few because each is a time series. A View of
// the program's SDK may set others.
var (
	buckets         = []float64{.003, .01, .03, .1, .3, 1, 10}
	recoveryBuckets = []float64{.3, 1, 10, 60, 600} // up to the length of an outage
	writeBuckets    = []float64{1, 10}              // up to the timeout of a write
)

// The reasons that are always shown, also as 0. ReasonRebalance, ReasonShutdown and
// ReasonLost are not among them: such a source has ended, and its metrics with it.
var (
	holdReasons     = []Reason{ReasonBreaker, ReasonBackpressure, ReasonStorm, ReasonDLQ, ReasonOperator, ReasonLimiter}
	functionReasons = []Reason{ReasonBreaker, ReasonOperator}
)

// openCauses are the causes by which a closed breaker opens.
var openCauses = []string{
	string(breaker.CauseRun), string(breaker.CauseRate), string(breaker.CauseSlow), string(breaker.CauseQuorum), string(causeOutage), string(causeStorm), causeOperator,
}

var deadReasons = []dlq.Reason{
	dlq.ReasonAttempts, dlq.ReasonPoisonHead, dlq.ReasonGuess, dlq.ReasonLastDelivery, dlq.ReasonPermanent, dlq.ReasonQuarantine, dlq.ReasonOperator,
}

// A Lagger is a [Port] that knows how many messages wait at the broker. Lag returns that
// number; -1 means unknown. It is called when metrics are read, and must answer from
// memory.
type Lagger interface{ Lag() int64 }

// A Marker is a [Port] of a log, which tells the broker only a low watermark. Ahead is how
// many messages are settled behind an unsettled one, so that the broker does not know
// of them. They count towards [Policy.Window] like unsettled messages. So at most a window of
// messages is handled again if the source moves.
//
// The goroutine that called Ack calls Ahead after it, without a lock; such calls overlap if
// the calls of Ack do. On the closed path, where nothing is unsettled, Ahead is not called.
// It must answer from memory, and only Ack may change its result.
type Marker interface{ Ahead() int }

// A Taker is a [Port] of the passive shape that takes messages off [Source.Ready] before
// the program does. TakenAt is when the program took the message for its current attempt,
// zero before that: the time of the call begins then, and not on Ready. Unlike all other
// methods of a port, TakenAt is called under the source's lock. It must answer from memory,
// and must take no lock.
type Taker[M any] interface{ TakenAt(m M) time.Time }

// metrics are the instruments of a Guard. The sources keep most counters, and these are
// read only with the metrics. Rare and sampled events are recorded when they happen.
type metrics struct {
	g           *Guard
	tracer      trace.Tracer
	process     metric.Float64Histogram
	recovery    metric.Float64Histogram
	failures    metric.Int64Counter
	dead        metric.Int64Counter
	overtaken   metric.Int64Counter
	transitions metric.Int64Counter
	storms      metric.Int64Counter
	write       metric.Float64Histogram
	observer    metric.Registration

	dependencyCalls metric.Int64Counter
	flows           flows
}

func newMetrics(g *Guard) (*metrics, error) {
	provider := g.meters
	if provider == nil {
		provider = otel.GetMeterProvider()
	}
	meter := provider.Meter(scopeName)
	m := &metrics{g: g}
	m.flows.producers.longest, m.flows.dependencies.longest = longestProducer, longestDependency
	if g.traces != nil {
		m.tracer = g.traces.Tracer(scopeName)
	}
	var errs []error
	keep := func(err error) { errs = append(errs, err) }
	var err error
	m.process, err = meter.Float64Histogram(metricProcess, metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(buckets...),
		metric.WithDescription("Duration of handler calls that succeeded, of one message in "+strconv.Itoa(sampleOneIn)+"."))
	keep(err)
	m.recovery, err = meter.Float64Histogram(metricRecovery, metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(recoveryBuckets...),
		metric.WithDescription("From a message's first failure to its ack, of those that succeeded in the end."))
	keep(err)
	m.failures, err = meter.Int64Counter(metricFailures, metric.WithUnit("{attempt}"), metric.WithDescription("Handler calls that failed, by error.type."))
	keep(err)
	m.dead, err = meter.Int64Counter(metricDeadLetters, metric.WithUnit("{message}"), metric.WithDescription("Dead letters confirmed, by reason."))
	keep(err)
	m.transitions, err = meter.Int64Counter(metricTransitions, metric.WithUnit("{transition}"), metric.WithDescription("Breakers opened and closed."))
	keep(err)
	m.storms, err = meter.Int64Counter(metricStorms, metric.WithUnit("{storm}"), metric.WithDescription("Storms that began in a source."))
	keep(err)
	m.write, err = meter.Float64Histogram(metricWrite, metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(writeBuckets...),
		metric.WithDescription("Duration of a dead letter's write, by outcome."))
	keep(err)
	m.dependencyCalls, err = meter.Int64Counter(metricDependency, metric.WithUnit("{call}"), metric.WithDescription("Calls of dependencies that handlers name, by error.type."))
	keep(err)
	m.overtaken, err = meter.Int64Counter(metricOvertaken, metric.WithUnit("{message}"), metric.WithDescription("Messages that succeeded before one in front of them, to prove life."))
	keep(err)
	o, err := newObserved(meter)
	keep(err)
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	m.observer, err = meter.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		o.observe(to, g)
		return nil
	}, o.all...)
	return m, err
}

// observed are the instruments whose values are computed when the metrics are read.
type observed struct {
	consumed, handled, returned, retries, refused, quarantined, ackFailures, parkedTotal, followed metric.Int64ObservableCounter

	messages, used, age, hold, state, budget, lag, parked, spilled, ratio metric.Float64ObservableGauge
	fleetScope, heard, quorum, fleetStorm                                 metric.Float64ObservableGauge

	all []metric.Observable
}

func newObserved(meter metric.Meter) (*observed, error) {
	o := new(observed)
	var errs []error
	counter := func(name, unit, text string) metric.Int64ObservableCounter {
		c, err := meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(text))
		o.all, errs = append(o.all, c), append(errs, err)
		return c
	}
	gauge := func(name, unit, text string) metric.Float64ObservableGauge {
		c, err := meter.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(text))
		o.all, errs = append(o.all, c), append(errs, err)
		return c
	}
	o.consumed = counter(metricConsumed, "{message}", "Messages handed over by the broker's client.")
	o.handled = counter(metricHandled, "{message}", "Messages handled and acked; ignored and parked ones too.")
	o.returned = counter(metricReturned, "{message}", "Messages given back to the broker, or acked in vain.")
	o.retries = counter(metricRetries, "{attempt}", "Handler calls after a message's first.")
	o.refused = counter(metricRefused, "{message}", "Calls of a protected function that were refused.")
	o.quarantined = counter(metricQuarantined, "{message}", "Messages that matched a rule of the quarantine.")
	o.ackFailures = counter(metricAckFailures, "{message}", "Acks that the broker or its client did not take.")
	o.parkedTotal = counter(metricParkedTotal, "{message}", "Messages parked for another try.")
	o.followed = counter(metricFollowed, "{message}", "Messages sent after a parked one, unhandled, to keep their order.")
	o.messages = gauge(metricMessages, "{message}", "Unsettled messages, by state.")
	o.used = gauge(metricUsed, "1", "Part of the window that is used: at 1 intake has stopped. 0 while messages go to the spill.")
	o.age = gauge(metricHoldAge, "s", "Age of the oldest unsettled message in this process.")
	o.hold = gauge(metricHold, "", "1 for each reason why the source is not simply running, else 0.")
	o.state = gauge(metricBreaker, "", "1 for the state of the breaker, or of the wider scope that holds it, else 0.")
	o.budget = gauge(metricBudget, "{credit}", "DLQ credits left.")
	o.lag = gauge(metricLag, "{message}", "Messages behind at the broker.")
	o.parked = gauge(metricParked, "{message}", "Messages parked now.")
	o.spilled = gauge(metricSpilled, "{message}", "Unsettled messages that are in the spill on this host's disk.")
	o.ratio = gauge(metricDLQRatio, "1", "Dead letters over messages that failed.")
	o.fleetScope = gauge(metricFleetScope, "", "1 for what the fleet makes of a breaker's scope, else 0.")
	o.heard = gauge(metricFleetHeard, "{process}", "Processes of the roster that are heard, this one included.")
	o.quorum = gauge(metricFleetQuorum, "{process}", "Processes that make a quorum.")
	o.fleetStorm = gauge(metricFleetStorm, "", "1 while the fleet is in storm over the topic or queue, else 0.")
	return o, errors.Join(errs...)
}

// topicSum is the sum over the open sources of one topic or queue.
type topicSum struct {
	with         metric.MeasurementOption
	dead, failed uint64
	storm        bool
}

func (o *observed) observe(to metric.Observer, g *Guard) {
	topics := make(map[attribute.Distinct]*topicSum)
	for _, c := range g.all() {
		st, own := c.State(), c.measured()
		o.source(to, c, st, own)
		if own.function {
			continue
		}
		key := own.topicSet.Equivalent()
		sum := topics[key]
		if sum == nil {
			sum = &topicSum{with: own.topic}
			topics[key] = sum
		}
		sum.dead += st.Account.DeadLettered
		sum.failed += st.Tally.FailedMessages
		sum.storm = sum.storm || st.FleetStorm.Active
	}
	for _, sum := range topics {
		o.observeTopic(to, g, sum)
	}
	if g.fleet == nil {
		return
	}
	for i, f := range g.fleet.Scopes() {
		state := f.State.String()
		if f.Probing {
			state = "probing"
		}
		for _, word := range []string{breaker.Closed.String(), breaker.Open.String(), "probing"} {
			to.ObserveFloat64(o.fleetScope, number(state == word),
				metric.WithAttributes(attribute.String("scope", f.Name), attribute.String("state", word)))
		}
		if i == 0 { // the numbers are the same for all scopes
			to.ObserveFloat64(o.heard, float64(f.Heard))
			to.ObserveFloat64(o.quorum, float64(f.Need))
		}
	}
}

func (o *observed) observeTopic(to metric.Observer, g *Guard, sum *topicSum) {
	to.ObserveFloat64(o.ratio, float64(sum.dead)/float64(max(sum.failed, 1)), sum.with)
	if g.fleet != nil {
		to.ObserveFloat64(o.fleetStorm, number(sum.storm), sum.with)
	}
}

// source observes the instruments of one source. A gauge at rest is 0, and is not left out.
func (o *observed) source(to metric.Observer, c controls, st State, own *sourceMetrics) {
	with := func(kv ...attribute.KeyValue) metric.MeasurementOption {
		return metric.WithAttributes(append(slices.Clip(own.attrs), kv...)...)
	}
	a, t := st.Account, st.Tally
	to.ObserveInt64(o.consumed, int64(a.Received), own.base)
	to.ObserveInt64(o.handled, int64(a.Acked), own.base)
	to.ObserveInt64(o.returned, int64(a.Returned), own.base)
	to.ObserveInt64(o.retries, int64(t.Retries), own.base)
	for word, n := range map[string]int{
		"waiting": a.Waiting, "processing": a.Processing, "settling": a.Settling, "held": a.Held, "retry_wait": a.RetryWait,
	} {
		to.ObserveFloat64(o.messages, float64(n), with(attribute.String("state", word)))
	}
	active := make(map[Reason]bool, len(own.reasons))
	for _, reason := range own.reasons {
		active[reason] = false
	}
	for _, h := range st.Holds {
		active[h.Reason] = true
	}
	for reason, on := range active {
		to.ObserveFloat64(o.hold, number(on), with(attribute.String("reason", reason.String())))
	}
	if !st.Settings.NoBreaker {
		state := st.Breaker.State
		if state == breaker.Closed && active[ReasonBreaker] {
			state = breaker.Open // a wider scope is open
		}
		for _, s := range []breaker.State{breaker.Closed, breaker.Open, breaker.HalfOpen} {
			to.ObserveFloat64(o.state, number(state == s), with(attribute.String("scope", own.scopes), attribute.String("state", s.String())))
		}
	}
	if own.function {
		to.ObserveInt64(o.refused, int64(t.Diverted), own.base)
		return
	}
	to.ObserveInt64(o.quarantined, int64(t.Quarantined), own.base)
	to.ObserveInt64(o.ackFailures, int64(t.AckFailures), own.base)
	to.ObserveFloat64(o.used, st.used, own.base)
	to.ObserveFloat64(o.age, st.OldestAge.Seconds(), own.base)
	to.ObserveFloat64(o.budget, st.Budget, own.base)
	if n := c.lag(); n >= 0 {
		to.ObserveFloat64(o.lag, float64(n), own.base)
	}
	if st.Settings.Spill {
		to.ObserveFloat64(o.spilled, float64(st.Spilled), own.base)
	}
	if now, after, ok := c.parked(); ok {
		to.ObserveFloat64(o.parked, float64(now), own.base)
		to.ObserveInt64(o.followed, int64(after), own.base)
		to.ObserveInt64(o.parkedTotal, int64(t.Parked), own.base)
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (m *metrics) close() {
	if m.observer != nil {
		_ = m.observer.Unregister() // Unregister only drops the callback
	}
}

// transition counts a breaker's change; partitions count for their topic as a whole. A
// change to half-open does not count: each open period ends with one.
func (m *metrics) transition(c circuit.Change) {
	scope, cause := c.Scope, ""
	switch c.To {
	case breaker.HalfOpen:
		return
	case breaker.Open:
		cause = string(c.Cause)
	default:
	}
	for _, s := range m.g.all() {
		if own := s.measured(); own.scope == c.Scope {
			scope = own.scopes
			break
		}
	}
	m.addTransition(1, scope, c.To, cause)
}

func (m *metrics) addTransition(n int64, scope string, to breaker.State, cause string) {
	m.transitions.Add(context.Background(), n, metric.WithAttributes(
		attribute.String("scope", scope), attribute.String("to", to.String()), attribute.String("cause", cause)))
}

// sourceMetrics are the metrics with the attributes of one source.
type sourceMetrics struct {
	*metrics
	attrs    []attribute.KeyValue
	base     metric.MeasurementOption // attrs
	topicSet attribute.Set
	topic    metric.MeasurementOption // topicSet: the same for all sources of a topic or queue
	node     Node                     // the Node of the topic or queue, or of the source if it has none
	name     string                   // name of the span
	scope    string                   // scope of the breaker
	scopes   string                   // scope, with * for the partition
	reasons  []Reason                 // the reasons that can hold the source
	function bool                     // made by [Protect]: no broker and no dead letters
}

func (m *metrics) source(cfg SourceConfig) sourceMetrics {
	var topic []attribute.KeyValue
	put := func(attrs *[]attribute.KeyValue, key, value string) {
		if value != "" {
			*attrs = append(*attrs, attribute.String(key, value))
		}
	}
	put(&topic, "messaging.system", cfg.System)
	put(&topic, "messaging.destination.name", cfg.Destination)
	put(&topic, "messaging.consumer.group.name", m.g.cfg.Group)
	put(&topic, "messaging.operation.name", "process")
	own := slices.Clone(topic)
	put(&own, "stormguard.source", cfg.Name)
	put(&own, "messaging.destination.partition.id", cfg.Partition)
	if cfg.Destination == "" {
		topic = own
	}
	sm := sourceMetrics{
		metrics: m, attrs: own, base: metric.WithAttributes(own...), name: "process " + cfg.Destination,
		topicSet: attribute.NewSet(topic...), topic: metric.WithAttributes(topic...), reasons: holdReasons,
	}
	sm.node = Node{nodeTopic, cmp.Or(cfg.Destination, cfg.Name)}
	if cfg.Limiter == nil {
		sm.reasons = holdReasons[:len(holdReasons)-1]
	}
	path := m.g.path(cfg)
	sm.scope = strings.Join(path, "/")
	sm.scopes = sm.scope
	if len(path) == 3 {
		sm.scopes = strings.Join(append(path[:2:2], "*"), "/")
	}
	return sm
}

func (s *Source[M]) measured() *sourceMetrics { return &s.metrics }

func (s *Source[M]) lag() int64 {
	if l, ok := any(s.port).(Lagger); ok {
		return l.Lag()
	}
	return -1
}

func (s *Source[M]) parked() (now int, followed uint64, ok bool) {
	if s.parker == nil || s.from != nil { // the parent source reports it
		return 0, 0, false
	}
	now, followed = s.parker.Parked()
	return now, followed, true
}

// sampled tells whether a message is timed: the first of each sampleOneIn. n counts from 1.
func (m *sourceMetrics) sampled(n uint64) bool { return n%sampleOneIn == 1 }

func (m *sourceMetrics) recovered(ctx context.Context, d time.Duration) {
	m.recovery.Record(ctx, d.Seconds(), m.topic)
}

func (m *sourceMetrics) deadLettered(ctx context.Context, why dlq.Reason) { m.addDead(ctx, 1, why) }

func (m *sourceMetrics) addDead(ctx context.Context, n int64, why dlq.Reason) {
	m.dead.Add(ctx, n, m.topic, metric.WithAttributes(attribute.String("reason", string(why))))
}

// atRest adds 0 to the counters, so that they are shown before the first event. A scraper
// that never saw the 0 sees no change in a series that begins at 1.
func (m *sourceMetrics) atRest() {
	for _, kind := range []string{ClassDependency.String(), ClassMessage.String(), ClassUnknown.String(), kindTimeout, kindPanic} {
		m.addFailed(context.Background(), 0, kind)
	}
	if m.function {
		return
	}
	for _, why := range deadReasons {
		m.addDead(context.Background(), 0, why)
	}
	for _, cause := range openCauses {
		m.addTransition(0, m.scopes, breaker.Open, cause)
	}
	m.storms.Add(context.Background(), 0, m.topic)
	m.overtaken.Add(context.Background(), 0, m.topic)
}

// wrote records a call of the dead-letter writer.
func (m *sourceMetrics) wrote(ctx context.Context, d time.Duration, err error) {
	outcome := "confirmed"
	switch {
	case errors.Is(err, dlq.ErrPutOff):
		outcome = "put_off"
	case err != nil:
		outcome = "failed"
	}
	m.write.Record(ctx, d.Seconds(), m.topic, metric.WithAttributes(attribute.String("outcome", outcome)))
}

func (m *sourceMetrics) stormed() { m.storms.Add(context.Background(), 1, m.topic) }

func (m *sourceMetrics) overtook() { m.overtaken.Add(context.Background(), 1, m.topic) }

// failed counts a failed call.
func (m *sourceMetrics) failed(ctx context.Context, kind string) { m.addFailed(ctx, 1, kind) }

func (m *sourceMetrics) addFailed(ctx context.Context, n int64, kind string) {
	m.failures.Add(ctx, n, m.topic,
		metric.WithAttributes(attribute.String("scope", m.scopes), attribute.String("error.type", kind)))
}

const (
	kindPanic   = "panic"
	kindTimeout = "timeout"
)

// kind is the error.type of a failed call, one of five words: the error's own type or text
// would make too many time series.
func (r result) kind() string {
	switch {
	case r.panicked:
		return kindPanic
	case r.timedOut:
		return kindTimeout
	default:
		return r.class.String()
	}
}

// observe is call, timed for each sampled message, with a span if there is a tracer.
func (s *Source[M]) observe(ctx *callContext, m M, n uint64) (stack []byte, err error) {
	if s.metrics.tracer != nil {
		parent, span := s.span(ctx.parent, m)
		ctx.parent = parent
		defer func() {
			if err != nil {
				span.SetStatus(codes.Error, "")
				span.SetAttributes(attribute.String("error.type", dlq.DescribeError(err, nil).Type))
			}
			span.End()
		}()
	}
	if !s.metrics.sampled(n) {
		return s.call(ctx, m)
	}
	if n%producerOneIn == 1 && ctx.before == 0 && s.lookedAt.Swap(n) != n { // after a failure the same n comes again
		s.lookUpProducer(m)
	}
	start := s.g.now()
	stack, err = s.call(ctx, m)
	if err == nil {
		s.metrics.process.Record(ctx, (s.g.now() - start).Seconds(), s.metrics.topic)
	}
	return stack, err
}
