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

// A Flow is one way of messages or calls that a Guard has seen since it began: from a producer
// to a topic or queue, from there to the group, or from the group to a dependency that a
// handler names by [Calls].
type Flow struct {
	From, To Node

	// Count is how many messages the group received, or calls it made. Of a producer it is
	// how many were looked at: the first message of each source, and each 1,024th after it.
	Count  uint64
	Failed uint64 // handler calls, or calls of the dependency; 0 for a producer

	Sources int // open sources of the topic or queue, towards the group
	Held    int // of these, that are not simply running
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

// producerOneIn is how many messages of a source there are to one whose producer is looked
// up, a multiple of sampleOneIn: a port makes a copy of the headers for it.
const producerOneIn = 16 * sampleOneIn

// The longest names, in bytes. A producer's is an URI.
const (
	longestDependency = 64
	longestProducer   = 128
)

// producerHeaders are where a message says who made it: CloudEvents' source attribute as its
// bindings for Kafka, NATS and AMQP write it.
var producerHeaders = []string{"ce_source", "ce-source", "cloudEvents:source", "cloudEvents_source"}

// producerProperty is that of AMQP.
const producerProperty = "app-id"

// mostFlows is how many ways from and to topics a Guard remembers: a broker may make up names
// of queues without end. Ways of open sources, and those to dependencies, are told beyond it.
const mostFlows = 1024

// flows are what a Guard has seen of each way. No lock is taken under mu, and mu under none.
type flows struct {
	producers, dependencies names

	mu    sync.Mutex
	known map[[2]Node]*Flow // but for what open sources count
}

// count adds to what has gone from one node to another.
func (f *flows) count(from, to Node, n, failed uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ends := [2]Node{from, to}
	flow := f.known[ends]
	if flow == nil {
		if f.known == nil {
			f.known = make(map[[2]Node]*Flow)
		}
		if len(f.known) >= mostFlows && to.Kind != nodeDependency { // those are few
			return
		}
		flow = &Flow{From: from, To: to}
		f.known[ends] = flow
	}
	flow.Count += n
	flow.Failed += failed
}

// names are those that a Guard has met of one kind. They come from outside: they are few and
// short, or "other".
type names struct {
	longest int // bytes

	mu    sync.Mutex
	known map[string]bool
}

const (
	mostNames = 32
	otherName = "other"
)

// name is the name, or that of the rest.
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

// Flows are the ways of messages and calls in this process, by name: who produces what its
// sources read, as far as messages say so, and what their handlers call. A message says so by
// CloudEvents' source attribute in its headers, or AMQP's app-id. It costs a look at each source.
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

// node is the group's.
func (g *Guard) node() Node { return Node{nodeGroup, g.cfg.Group} }

// flowed keeps what a source has counted that has ended.
func (s *Source[M]) flowed() {
	st := s.State()
	s.metrics.flows.count(s.metrics.node, s.g.node(), st.Account.Received, st.Tally.Failures)
}

// lookUpProducer looks who made a message.
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
