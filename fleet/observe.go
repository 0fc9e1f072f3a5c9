// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

const scopeName = "github.com/stormguard-mq/stormguard/fleet"

// The metrics. docs/fleet-metrics.md says what each means.
const (
	metricMerges        = "stormguard.fleet.merges"
	metricRefused       = "stormguard.fleet.refused"
	metricPackets       = "stormguard.fleet.packets"
	metricMembers       = "stormguard.fleet.members"
	metricConfiguration = "stormguard.fleet.configuration"
	metricLacking       = "stormguard.fleet.configuration.lacking"
	metricSyncDelay     = "stormguard.fleet.sync.delay"
	metricUnacked       = "stormguard.fleet.unacked"
	metricBacklog       = "stormguard.fleet.journal.backlog"
	metricBacklogAge    = "stormguard.fleet.journal.backlog.age"
	metricClockOffset   = "stormguard.fleet.clock.offset"
	metricClockBroken   = "stormguard.fleet.clock.violations"
	metricSilence       = "stormguard.fleet.silence"
	metricRegisterAway  = "stormguard.fleet.register.away"
	metricTokenSkew     = "stormguard.limiter.skew"
	metricTokens        = "stormguard.limiter.tokens"
	metricShare         = "stormguard.limiter.share"
	metricShareStranded = "stormguard.limiter.share.stranded"
	metricKeys          = "stormguard.limiter.keys"
	metricAdmitted      = "stormguard.limiter.admitted"
	metricDenied        = "stormguard.limiter.denied"
)

// seen has the state of metrics and spans.
type seen struct {
	tracer   trace.Tracer // nil if there is no TracerProvider
	observer metric.Registration

	mu       sync.Mutex
	decision trace.SpanContext // span of the latest Wait that had to wait
	lagging  bool
}

func (s *seen) close() {
	if s.observer != nil {
		_ = s.observer.Unregister()
	}
}

// look registers the instruments. They are read when metrics are collected, and cost nothing
// otherwise.
func (p *Process) look(o options) (*seen, error) {
	provider := o.meters
	if provider == nil {
		provider = otel.GetMeterProvider()
	}
	s := &seen{}
	if o.traces != nil {
		s.tracer = o.traces.Tracer(scopeName)
	}
	meter := provider.Meter(scopeName)
	var errs []error
	var all []metric.Observable
	counter := func(name, unit, text string) metric.Int64ObservableCounter {
		c, err := meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(text))
		errs, all = append(errs, err), append(all, c)
		return c
	}
	gauge := func(name, unit, text string) metric.Float64ObservableGauge {
		g, err := meter.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(text))
		errs, all = append(errs, err), append(all, g)
		return g
	}
	tokens := gauge(metricTokens, "{token}", "Tokens of this process, by state: level, cap, lent, held, pinned.")
	share := gauge(metricShare, "1", "This process's share of the rates.")
	stranded := gauge(metricShareStranded, "1", "Shares of members that are not heard. Nobody mints them, unless TakeOver is on.")
	keys := gauge(metricKeys, "{key}", "Keys of limits that are known.")
	admitted := counter(metricAdmitted, "{token}", "Tokens admitted here, by key.")
	denied := counter(metricDenied, "{token}", "Tokens asked for here and not given, by key.")
	merges := counter(metricMerges, "{delta}", "Deltas of peers taken in, by section.")
	refused := counter(metricRefused, "{delta}", "Packets and deltas refused, by section and reason.")
	packets := counter(metricPackets, "{packet}", "Packets, by direction.")
	members := gauge(metricMembers, "{process}", "Other processes, by state: fresh, silent, lost.")
	configuration := gauge(metricConfiguration, "", "Number of the configuration: newest, complete, applied.")
	lacking := gauge(metricLacking, "{process}", "Members that have not applied a configuration though their share shrank.")
	away := gauge(metricRegisterAway, "", "1 while the register of the configuration cannot be reached, else 0.")
	silence := gauge(metricSilence, "s", "For how long a peer has not been heard.")
	delay := gauge(metricSyncDelay, "s", "The longest lately from a change to its acknowledgement by a peer that is heard.")
	unacked := gauge(metricUnacked, "{change}", "Changes that peers have not acknowledged.")
	backlog := gauge(metricBacklog, "{entry}", "Journal entries that the slowest peer lacks.")
	backlogAge := gauge(metricBacklogAge, "s", "For how long a peer has lacked one.")
	offset := gauge(metricClockOffset, "s", "A peer's wall clock less ours.")
	broken := counter(metricClockBroken, "{stamp}", "Stamps of a peer that broke the 50 ms rule.")
	skew := gauge(metricTokenSkew, "1", "Standard deviation of level over cap among the members.")
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	by := metric.WithAttributes
	var err error
	s.observer, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		l := p.limits.Stats()
		for state, v := range map[string]int64{"level": l.Level, "cap": l.Cap, "lent": l.Lent, "held": l.Held, "pinned": l.Pinned} {
			o.ObserveFloat64(tokens, float64(v)/micro, by(attribute.String("state", state)))
		}
		o.ObserveFloat64(share, l.Share)
		o.ObserveFloat64(stranded, l.Stranded)
		o.ObserveFloat64(keys, float64(l.Keys))
		named := p.limits.Configuration().Limits
		for _, k := range p.keys() {
			if _, ok := named[k.Key]; !ok && l.Keys > statusKeys {
				continue // there may be a key for each user
			}
			o.ObserveInt64(admitted, int64(k.Admitted), by(attribute.String("key", k.Key)))
			o.ObserveInt64(denied, int64(k.Denied), by(attribute.String("key", k.Key)))
		}
		if p.node == nil {
			return nil
		}
		st := p.node.Stats()
		for _, sec := range st.Session.Sections {
			o.ObserveInt64(merges, int64(sec.Merged), by(attribute.String("section", sec.Name)))
			o.ObserveInt64(refused, int64(sec.Refused), by(attribute.String("section", sec.Name), attribute.String("reason", "merge")))
		}
		for r, n := range st.Session.Refused {
			if n > 0 {
				o.ObserveInt64(refused, int64(n), by(attribute.String("section", ""), attribute.String("reason", gossip.Reason(r).String())))
			}
		}
		for d, n := range st.Refused {
			if n > 0 || gossip.Drop(d) == gossip.DropUnauthenticated { // an alert needs the 0
				o.ObserveInt64(refused, int64(n), by(attribute.String("section", ""), attribute.String("reason", gossip.Drop(d).String())))
			}
		}
		for reason, n := range map[string]uint64{"loans": l.Refused.Loans, "keys": l.Refused.Needs} {
			o.ObserveInt64(refused, int64(n), by(attribute.String("section", sectionLimits), attribute.String("reason", reason)))
		}
		o.ObserveInt64(packets, int64(st.PacketsIn), by(attribute.String("direction", "in")))
		o.ObserveInt64(packets, int64(st.PacketsOut), by(attribute.String("direction", "out")))
		for state, n := range map[gossip.PeerState]int{gossip.Fresh: st.Session.Fresh, gossip.Silent: st.Session.Silent, gossip.Lost: st.Session.Lost} {
			o.ObserveFloat64(members, float64(n), by(attribute.String("state", state.String())))
		}
		for which, n := range map[string]uint64{"newest": l.Number, "complete": l.Completed, "applied": l.Applied} {
			o.ObserveFloat64(configuration, float64(n), by(attribute.String("which", which)))
		}
		status := p.Status()
		o.ObserveFloat64(lacking, float64(len(status.Configuration.Lacking)))
		o.ObserveFloat64(away, float64(min(1, len(status.Configuration.Away)))) // Away is empty while the register can be reached
		o.ObserveFloat64(delay, status.SyncDelay.Seconds())
		o.ObserveFloat64(unacked, float64(st.Session.Unacked))
		o.ObserveFloat64(backlog, float64(status.Backlog))
		o.ObserveFloat64(backlogAge, status.BacklogAge.Seconds())
		o.ObserveFloat64(skew, status.Skew)
		for _, m := range status.Members {
			if m.State != "self" && m.State != "unknown" {
				o.ObserveFloat64(silence, m.Heard.Seconds(), by(attribute.String("peer", m.Name)))
				o.ObserveFloat64(offset, m.Offset.Seconds(), by(attribute.String("peer", m.Name)))
				o.ObserveInt64(broken, int64(m.Broke), by(attribute.String("peer", m.Name)))
			}
		}
		return nil
	}, all...)
	return s, err
}

// Wait waits until n tokens of a key are admitted, as [limiter.Limiter.WaitN] does. With a tracer
// it does so within a span. When the fleet begins to lag, the span of the lag is linked to the
// latest of these spans that had to wait.
func (p *Process) Wait(ctx context.Context, key string, n int) error {
	l := p.limits.Key(key)
	if p.seen.tracer == nil {
		return l.WaitN(ctx, n)
	}
	ctx, span := p.seen.tracer.Start(ctx, "limit "+key, trace.WithAttributes(attribute.Int("stormguard.limiter.tokens", n)))
	defer span.End()
	if l.AllowN(n) {
		return nil
	}
	p.seen.mu.Lock()
	p.seen.decision = span.SpanContext()
	p.seen.mu.Unlock()
	err := l.WaitN(ctx, n)
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	return err
}

// watchLag logs when the fleet begins to lag and when that ends. With a tracer the beginning has a
// span, too.
func (p *Process) watchLag(now time.Duration) {
	j := p.journal.Stats(now)
	var delay time.Duration
	var slowest string
	for _, peer := range p.node.Peers() {
		if peer.State == gossip.Fresh && peer.Delay > delay {
			delay, slowest = peer.Delay, peer.Name
		}
	}
	lags := delay >= p.cfg.LagDelay || j.Backlog >= uint64(p.cfg.LagBacklog)
	p.seen.mu.Lock()
	began, ended := lags && !p.seen.lagging, !lags && p.seen.lagging
	decision := p.seen.decision
	p.seen.lagging = lags
	p.seen.mu.Unlock()
	if !began && !ended {
		return
	}
	p.log.Warn("fleet: lag", "lags", lags, "sync_delay", delay, "peer", slowest, "backlog", j.Backlog, "age", j.Age)
	if !began || p.seen.tracer == nil {
		return
	}
	var links []trace.Link
	if decision.IsValid() {
		links = append(links, trace.Link{SpanContext: decision})
	}
	_, span := p.seen.tracer.Start(context.Background(), "fleet lag", trace.WithLinks(links...))
	span.AddEvent("stormguard.fleet.lag", trace.WithAttributes(
		attribute.Float64("stormguard.fleet.sync.delay", delay.Seconds()),
		attribute.String("stormguard.fleet.peer", slowest),
		attribute.Int64("stormguard.fleet.journal.backlog", int64(j.Backlog)),
	))
	span.End()
}

// Entry is one entry of the fleet's journal. Number, Subject and Text depend on Kind: Number is the
// configuration that was made; Subject is the member, scope, key or rule; Text has the details and
// who asked.
type Entry struct {
	At      time.Time `json:"at"`
	By      string    `json:"by"` // the process that wrote it
	Kind    string    `json:"kind"`
	Number  uint64    `json:"number,omitempty"`
	Subject string    `json:"subject,omitempty"`
	Text    string    `json:"text,omitempty"`
}

// Journal returns the journal's entries, oldest first. Without a roster it is empty.
func (p *Process) Journal() []Entry {
	if p.journal == nil {
		return []Entry{}
	}
	entries := p.journal.Entries(nil)
	all := make([]Entry, len(entries))
	for i, e := range entries {
		all[i] = Entry{At: e.At.Time(), By: e.By.Name, Kind: e.Kind.String(), Number: e.Number, Subject: e.Subject, Text: e.Text}
	}
	return all
}
