// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// MaxPacket is the longest packet in bytes: an Ethernet frame, less IPv6, UDP, a tunnel's header
// and a driver's encryption.
const MaxPacket = 1400

// maxName is the longest name of a process, a zone or a region.
const maxName = 64

// Config holds an operator's settings. Self is required. Every other field may be unset, which
// means its documented default.
type Config struct {
	// Cluster separates fleets that can reach each other: packets of another cluster are refused
	// and counted. Up to 255 bytes. Unset is a cluster, too.
	Cluster string

	// Self is this incarnation of this process. Name has 1 to 64 bytes and stays the same after a
	// restart. Incarnation is higher after each restart, and never 0.
	Self crdt.Replica

	// Zone and Region say where this process runs. Peers of the own zone are served first, then
	// those of the own region. Up to 64 bytes each. Unset is a place like any other.
	Zone, Region string

	// Floor is the least time between two packets to one peer. Unacknowledged changes are sent
	// again at each floor. A change reaches its peer within (m-1)·Floor plus the delay. m is the
	// number of packets of which one almost certainly arrives: 5 at 35 % independent loss and p99.
	// In [100µs, 1s]; unset means 2 ms.
	Floor time.Duration

	// KeepAlive is the longest time that a peer waits for a packet when there is nothing to say. A
	// process sends two packets in that time, to all its peers together. With more than two peers
	// each peer waits longer. Each packet announces how much later than a keep-alive the next one
	// may come: that is the rest of its sender. If one peer of a pair needs the other, the pair
	// stays at the full pace; see [Keeper].
	//
	// A peer is silent after its rest plus 20 keep-alives, and lost after its rest plus 200. The
	// address of a lost peer is tried every 1 to 5 s. In [Floor, 1m]; unset means 50 ms, or Floor
	// if that is more. Use the same value in the whole fleet.
	KeepAlive time.Duration

	// MaxPacket is the longest packet in bytes. In [512, 1400]; unset means 1,400. A driver that
	// encrypts subtracts its overhead, as a [Node] does.
	MaxPacket int

	// MaxPeers is the most peers that are known, dead ones included. When so many are known, the
	// lost peer that was not heard for longest makes room for a newcomer. That incarnation is over,
	// and is told so if it comes back. If every lost peer was heard in the last ten minutes, the
	// newcomer is refused and counted. The table of addresses has four times as many entries. In
	// [1, 4096]; unset means 512. A peer costs about 2 KB plus 1 KB per section.
	MaxPeers int

	// Burst is the most packets that one Step sends. The others are due again at once. When more
	// are due, peers that are late by more than KeepAlive come first, then nearby peers. In [1,
	// 4096]; unset means 128.
	Burst int
}

// WithDefaults returns c with every unset field replaced by its default.
func (c Config) WithDefaults() Config {
	def(&c.Floor, 2*time.Millisecond)
	def(&c.KeepAlive, max(50*time.Millisecond, c.Floor))
	def(&c.MaxPacket, MaxPacket)
	def(&c.MaxPeers, 512)
	def(&c.Burst, 128)
	return c
}

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Validate reports all faults of c at once, as an error that is [ErrConfig], or nil. An unset field
// is checked as its default.
func (c Config) Validate() error {
	var wrong []error
	bad := func(field string, value any, want string) {
		wrong = append(wrong, fmt.Errorf("%w: %s: %v is not in %s", ErrConfig, field, value, want))
	}
	length := func(field, v string, lo, hi int) {
		if len(v) < lo || len(v) > hi {
			bad(field, fmt.Sprintf("%q", v), fmt.Sprintf("[%d, %d] bytes", lo, hi))
		}
	}
	span := func(field string, v, lo, hi time.Duration) {
		if v < lo || v > hi {
			bad(field, v, fmt.Sprintf("[%v, %v]", lo, hi))
		}
	}
	count := func(field string, v, lo, hi int) {
		if v < lo || v > hi {
			bad(field, v, fmt.Sprintf("[%d, %d]", lo, hi))
		}
	}
	c = c.WithDefaults()
	length("Cluster", c.Cluster, 0, 255)
	length("Self.Name", c.Self.Name, 1, maxName)
	if c.Self.Incarnation == 0 {
		bad("Self.Incarnation", 0, "[1, 2^64-1]")
	}
	length("Zone", c.Zone, 0, maxName)
	length("Region", c.Region, 0, maxName)
	span("Floor", c.Floor, 100*time.Microsecond, time.Second)
	span("KeepAlive", c.KeepAlive, max(c.Floor, 100*time.Microsecond), time.Minute)
	count("MaxPacket", c.MaxPacket, 512, MaxPacket)
	count("MaxPeers", c.MaxPeers, 1, 4096)
	count("Burst", c.Burst, 1, 4096)
	return errors.Join(wrong...)
}

// An Option supplies a collaborator that a config file cannot express.
type Option interface{ apply(*options) }

type options struct {
	sections []section
	rand     func() float64
	node     nodeOptions
}

type optionFunc func(*options)

func (f optionFunc) apply(o *options) { f(o) }

// WithSection adds a section to the session. All peers know it by its name, of 1 to 255 bytes. In a
// packet the sections take turns at being first, so that a section that always fills its room does
// not starve the others. A peer without the section acknowledges its changes and ignores them.
func WithSection(name string, s Section) Option {
	return optionFunc(func(o *options) {
		count, _ := s.(Counter)
		keep, _ := s.(Keeper)
		o.sections = append(o.sections, section{name: name, id: sectionID(name), Section: s, count: count, keep: keep})
	})
}

// WithRand sets the source of random numbers: f returns numbers in [0, 1). The session uses them
// for the waits between tries of an address, for rests, and for the id of an incarnation that
// rejoins. The default is math/rand/v2. A simulation that must repeat exactly supplies its own.
func WithRand(f func() float64) Option {
	return optionFunc(func(o *options) { o.rand = f })
}

func buildOptions(opts []Option) (options, error) {
	o := options{rand: rand.Float64}
	for _, opt := range opts {
		opt.apply(&o)
	}
	var wrong []error
	if len(o.sections) > maxSections {
		wrong = append(wrong, fmt.Errorf("%w: WithSection: %d sections are not in [0, %d]", ErrConfig, len(o.sections), maxSections))
	}
	for i, sec := range o.sections {
		if len(sec.name) < 1 || len(sec.name) > 255 {
			wrong = append(wrong, fmt.Errorf("%w: WithSection: %q is not in [1, 255] bytes", ErrConfig, sec.name))
		}
		if sec.Section == nil {
			wrong = append(wrong, fmt.Errorf("%w: WithSection: %q is nil", ErrConfig, sec.name))
		}
		for _, other := range o.sections[:i] {
			if sec.id == other.id {
				wrong = append(wrong, fmt.Errorf("%w: WithSection: %q and %q have one id", ErrConfig, other.name, sec.name))
			}
		}
	}
	return o, errors.Join(wrong...)
}
