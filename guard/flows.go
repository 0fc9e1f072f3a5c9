// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"slices"
	"strings"
	"sync"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A Flow is one path of messages or calls that a Guard has seen since [New]: from a
// producer to a topic or queue, from a topic or queue to the group, or from the group to
// a dependency that a handler names with [Calls].
type Flow struct {
	From, To Node

	// Count is how many messages the group received, or how many calls it made. For a
	// producer it is a sample: the first message of each source, and each 1,024th after it.
	Count  uint64
	Failed uint64 // failed handler calls, or failed calls of the dependency; 0 for a producer

	Sources int // open sources of the topic or queue; 0 unless To is the group
	Held    int // how many of these sources have a [Hold]
}

// A Node is an end of a [Flow].
type Node struct {
	Kind string // "producer", "topic", "group" or "dependency"; a queue is a topic
	Name string
}

const (
	nodeProducer   = "producer"
	nodeTopic      = "topic"
	nodeGroup      = "group"
	nodeDependency = "dependency"
)

// producerOneIn is how many messages of a source there are for each lookup of a producer,
// a multiple of sampleOneIn. It is large because a port copies the headers for a lookup.
const producerOneIn = 16 * sampleOneIn

// The longest names, in bytes. A producer's name is a URI.
const (
	longestDependency = 64
	longestProducer   = 128
)

// producerHeaders are the headers that name a message's producer: CloudEvents' source
// attribute, as its bindings for Kafka, NATS and AMQP write it.
var producerHeaders = []string{"ce_source", "ce-source", "cloudEvents:source", "cloudEvents_source"}

// producerProperty is AMQP's property that names a message's producer.
const producerProperty = "app-id"

// mostFlows is how many flows from and to topics a Guard remembers, because a broker may
// make new queue names without end. Flows of open sources and flows to dependencies are
// reported beyond this limit.
const mostFlows = 1024

// flows are the flows that a Guard has seen. No other lock is taken under mu, and mu is
// taken under no other lock.
type flows struct {
	producers, dependencies names

	mu    sync.Mutex
	known map[[2]Node]*Flow // without the counts of open sources
}

// count adds n messages or calls, of which failed have failed, to a flow.
func (f *flows) count(from, to Node, n, failed uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ends := [2]Node{from, to}
	flow := f.known[ends]
	if flow == nil {
		if f.known == nil {
			f.known = make(map[[2]Node]*Flow)
		}
		if len(f.known) >= mostFlows && to.Kind != nodeDependency { // dependencies are few
			return
		}
		flow = &Flow{From: from, To: to}
		f.known[ends] = flow
	}
	flow.Count += n
	flow.Failed += failed
}

// names are the names of one kind that a Guard has met. Names come from outside, so their
// number and length are bounded; any other name becomes "other".
type names struct {
	longest int // bytes

	mu    sync.Mutex
	known map[string]bool
}

const (
	mostNames = 32
	otherName = "other"
)

// name returns the name, or otherName if the name is empty, too long or one too many.
func (n *names) name(name string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.known[name]:
		return name
	case name == "", len(name) > n.longest, len(n.known) >= mostNames:
		return otherName
	}
	if n.known == nil {
		n.known = make(map[string]bool)
	}
	n.known[name] = true
	return name
}

// Flows returns the flows of messages and calls in this process, sorted by name: who
// produces the messages that its sources read, and what their handlers call. A message
// names its producer with CloudEvents' source attribute in its headers, or with AMQP's
// app-id. Flows costs a [Source.State] for each source.
func (g *Guard) Flows() []Flow {
	f := &g.metrics.flows
	all := make(map[[2]Node]*Flow)
	f.mu.Lock()
	for ends, flow := range f.known {
		copied := *flow
		all[ends] = &copied
	}
	f.mu.Unlock()
	for _, s := range g.all() {
		own := s.measured()
		if own.function {
			continue
		}
		ends := [2]Node{own.node, g.node()}
		flow := all[ends]
		if flow == nil {
			flow = &Flow{From: ends[0], To: ends[1]}
			all[ends] = flow
		}
		st := s.State()
		flow.Count += st.Account.Received
		flow.Failed += st.Tally.Failures
		flow.Sources++
		if len(st.Holds) > 0 {
			flow.Held++
		}
	}
	out := make([]Flow, 0, len(all))
	for _, flow := range all {
		out = append(out, *flow)
	}
	slices.SortFunc(out, func(a, b Flow) int {
		return cmp.Or(cmp.Compare(a.From.Kind, b.From.Kind), cmp.Compare(a.From.Name, b.From.Name), cmp.Compare(a.To.Kind, b.To.Kind), cmp.Compare(a.To.Name, b.To.Name))
	})
	return out
}

// node is the Node of the group.
func (g *Guard) node() Node { return Node{nodeGroup, g.cfg.Group} }

// flowed adds the counts of a source that has ended to the flows.
func (s *Source[M]) flowed() {
	st := s.State()
	s.metrics.flows.count(s.metrics.node, s.g.node(), st.Account.Received, st.Tally.Failures)
}

// lookUpProducer counts a message for its producer.
func (s *Source[M]) lookUpProducer(m M) {
	if !s.begin() {
		return
	}
	meta, err := s.meta(m)
	s.end()
	if err != nil {
		return
	}
	name, _ := dlq.LookupText(meta.Properties, producerProperty)
	for _, header := range producerHeaders {
		if name != "" {
			break
		}
		name, _ = dlq.LookupText(meta.Headers, header)
	}
	if name == "" {
		return
	}
	name = s.metrics.flows.producers.name(strings.ToValidUTF8(name, "\uFFFD"))
	s.metrics.flows.count(Node{nodeProducer, name}, s.metrics.node, 1, 0)
}
