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

// MaxPacket is the most bytes that a packet has: what an Ethernet frame carries,
// less IPv6, UDP, a tunnel's header and a driver's encryption.
const MaxPacket = 1400

// maxName is the longest name of a process, a zone or a region.
const maxName = 64

// Config is what an operator may set. Self must be set; otherwise the zero value
// is valid and means the documented defaults.
type Config struct {
	// Cluster keeps fleets apart that reach each other: packets of another
	// cluster are refused and counted. Up to 255 bytes; unset is a cluster too.
	Cluster string

	// Self is this incarnation of this process. Name has 1 to 64 bytes and is the same
	// after a restart, Incarnation is higher then, and never 0.
	Self crdt.Replica

	// Zone and Region say where this process runs. Peers of the own zone, then
	// of the own region, are served first. Up to 64 bytes each; unset is one more
	// place.
	Zone, Region string

	// Floor is the least time between two packets to one peer. What is not
	// acknowledged is sent again at each floor, so a change reaches its peer
	// within (m-1)·Floor and the delay, where m packets are as good as sure to
	// get one through: 5 at 35 % independent loss and p99. In [100µs, 1s];
	// unset means 2 ms.
	Floor time.Duration

	// KeepAlive is how long a peer waits at most for a packet when there is
	// nothing to say. A process sends two packets in that time, to all its peers
	// together: with more than two peers each has to wait longer, and is told how long
	// that may be, its rest. Pairs of which one needs the other are kept at the full
	// pace, see [Keeper]. A peer is silent after its rest and 20 keep-alives, and
	// lost after its rest and 200: then its address is tried every 1 to 5 s. In
	// [Floor, 1m]; unset means 50 ms, or Floor if that is more. It should be the same
	// everywhere.
	KeepAlive time.Duration

	// MaxPacket bounds a packet, in bytes. In [512, 1400]; unset means 1,400. A
	// driver that encrypts takes what that adds off, as a [Node] does.
	MaxPacket int

	// MaxPeers bounds the peers that are known, dead ones included; the table of
	// addresses has four times as many. When it is full, the one that was lost for
	// longest makes room: that incarnation is over then, and is told so if it comes back.
	// If none was lost for ten minutes the newcomer is refused and counted. In
	// [1, 4096]; unset means 512. A peer costs about 2 KB and 1 KB per section.
	MaxPeers int

	// Burst is how many packets one Step sends at most; what is left over is due
	// at once. In [1, 4096]; unset means 128. When more are due, peers that are
	// late by more than KeepAlive come first, then those nearby.
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

// Validate reports everything that is wrong with c at once, as an error that
// is [ErrConfig], or nil. Unset fields are judged as their defaults.
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

// WithSection has the session move a section, known to all peers by its name,
// which has 1 to 255 bytes. In a packet the sections take turns at being first,
// so that one that always fills its room does not starve the others. A peer
// without the section acknowledges what it ignores.
func WithSection(name string, s Section) Option {
	return optionFunc(func(o *options) {
		count, _ := s.(Counter)
		keep, _ := s.(Keeper)
		o.sections = append(o.sections, section{name: name, id: sectionID(name), Section: s, count: count, keep: keep})
	})
}

// WithRand sets where jitter comes from: f returns numbers in [0, 1), and is
// called when an address that does not answer is tried. The default is
// math/rand/v2; a simulation that must replay gives its own.
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
