// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// A gossipCourse is what a member is told to do.
type gossipCourse struct {
	PerSecond int           `json:"per_second"`
	Time      time.Duration `json:"time"`
}

// A gossipResult is what came of it. Times are the host's clock.
type gossipResult struct {
	Born    []time.Duration      `json:"born"`    // of this member's versions, 1 first
	Arrived map[string][]arrival `json:"arrived"` // of the others' versions, by their names
	CPU     time.Duration        `json:"cpu"`
	Denied  int                  `json:"denied"`
	Packets uint64               `json:"packets"` // sent
	Acked   gossip.Histogram     `json:"acked"`   // from a change to its acknowledgement
}

// An arrival is of a version, and so of all before it that had not arrived.
type arrival struct {
	Version uint64        `json:"v"`
	At      time.Duration `json:"at"`
}

// versions are a member's own version, which each decision raises, and those of
// the others, as they arrive. It is the section that carries them.
type versions struct {
	mu      sync.Mutex
	born    []time.Duration
	arrived map[string][]arrival
	notify  func()
}

func newVersions() *versions { return &versions{arrived: map[string][]arrival{}} }

// next begins the next version.
func (v *versions) next() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.born = append(v.born, hostClock())
	if v.notify != nil {
		v.notify()
	}
}

func (v *versions) newest() uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return uint64(len(v.born))
}

func (v *versions) arrive(from string, version uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := v.arrived[from]
	if len(all) == 0 || all[len(all)-1].Version < version {
		v.arrived[from] = append(all, arrival{version, hostClock()})
	}
}

func (v *versions) result() gossipResult {
	v.mu.Lock()
	defer v.mu.Unlock()
	return gossipResult{Born: v.born, Arrived: v.arrived}
}

func (v *versions) OnChange(f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.notify = f
}

func (v *versions) Mark(crdt.Replica) uint64 { return v.newest() }

func (v *versions) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) ([]byte, uint64) {
	newest := v.newest()
	if newest == since || room < 8 {
		return b, since
	}
	return binary.LittleEndian.AppendUint64(b, newest), newest
}

func (v *versions) Merge(c crdt.Contact, b []byte) error {
	if len(b) != 8 {
		return errors.New("not a version")
	}
	v.arrive(c.From.Name, binary.LittleEndian.Uint64(b))
	return nil
}

func (*versions) Gone(time.Duration, crdt.Replica) {}

// settleTime is how long what was sent last may take to arrive.
const settleTime = 500 * time.Millisecond

// drive runs one course: so many decisions a second.
func drive(in *json.Decoder, decide func()) (cpu time.Duration, err error) {
	var course gossipCourse
	if err := in.Decode(&course); err != nil {
		return 0, err
	}
	spent, err := cpuTime()
	if err != nil {
		return 0, err
	}
	begun, done := time.Now(), 0
	for took := time.Duration(0); took < course.Time; took = time.Since(begun) {
		for due := int(took.Seconds() * float64(course.PerSecond)); done < due; done++ {
			decide()
		}
		time.Sleep(50 * time.Microsecond)
	}
	now, err := cpuTime()
	time.Sleep(settleTime)
	return now - spent, err
}

// startGossip joins the limits and the versions of a member to those of the others.
func startGossip(spec memberSpec, v *versions) (*escrow.Set, *gossip.Node, error) {
	self, clock := crdt.Replica{Name: spec.Name, Incarnation: gossip.NewIncarnation(time.Now(), rand.Uint64())}, gossip.Clock()
	cfg := escrow.Config{Limit: escrow.Limit(spec.Limit)}
	for _, name := range memberNames {
		cfg.Roster.Members = append(cfg.Roster.Members, escrow.Member{Name: name})
	}
	limits, err := escrow.New(self, cfg, escrow.WithClock(clock))
	if err != nil {
		return nil, nil, err
	}
	node, err := gossip.Start(gossip.NodeConfig{
		Config: gossip.Config{Cluster: "bench", Self: self}, Bind: "127.0.0.1:0", Network: spec.Network, Seeds: spec.Seeds,
	}, gossip.WithClock(clock), gossip.WithSection("limits", limits), gossip.WithSection("versions", v))
	if err != nil {
		limits.Close()
	}
	return limits, node, err
}

// runGossip is a member whose decisions are its limiter's.
func runGossip(spec memberSpec, in *json.Decoder, say func(any) error) error {
	v := newVersions()
	limits, node, err := startGossip(spec, v)
	if err != nil {
		return err
	}
	defer limits.Close()
	defer func() { _ = node.Close() }()
	if err := say(node.Addr().String()); err != nil {
		return err
	}
	limit := limits.Key("key")
	heard := func() (n int) {
		for _, peer := range node.Peers() {
			if peer.State == gossip.Fresh && peer.HearsUs {
				n++
			}
		}
		return n
	}
	if err := meet(func() bool { return heard() == len(memberNames)-1 && limit.AllowN(spec.Limit.Burst/12) }); err != nil {
		return err
	}
	if err := say(true); err != nil {
		return err
	}
	before := node.Stats()
	denied := 0
	cpu, err := drive(in, func() {
		if !limit.Allow() {
			denied++
		}
		v.next()
	})
	if err != nil {
		return err
	}
	after := node.Stats()
	r := v.result()
	r.CPU, r.Denied, r.Packets = cpu, denied, after.PacketsOut-before.PacketsOut
	r.Acked = after.Session.Delay
	r.Acked.Count -= before.Session.Delay.Count
	for i := range r.Acked.Bucket {
		r.Acked.Bucket[i] -= before.Session.Delay.Bucket[i]
	}
	if err := say(r); err != nil {
		return err
	}
	return in.Decode(new(any))
}

// runMemberlist is a rival: memberlist as it comes, for a LAN, on the loopback.
//
//   - queue: its broadcast queue at a GossipInterval of 5 ms; a member's newer
//     version takes the place of the older one.
//   - reliable: SendReliable of the newest version to each other member, every 2 ms
//     while there is a newer one.
func runMemberlist(spec memberSpec, in *json.Decoder, say func(any) error) error {
	v := newVersions()
	r := &rival{name: spec.Name, v: v}
	c := memberlist.DefaultLANConfig()
	c.Name, c.BindAddr, c.AdvertiseAddr, c.BindPort, c.AdvertisePort = spec.Name, "127.0.0.1", "127.0.0.1", 0, 0
	c.GossipInterval = 5 * time.Millisecond
	c.EnableCompression = false // it costs more than it saves here
	c.LogOutput = io.Discard
	c.Delegate = r
	list, err := memberlist.Create(c)
	if err != nil {
		return err
	}
	defer func() { _ = list.Shutdown() }()
	r.queue = &memberlist.TransmitLimitedQueue{NumNodes: list.NumMembers, RetransmitMult: c.RetransmitMult}
	self := list.LocalNode()
	if err := say(net.JoinHostPort(self.Addr.String(), strconv.Itoa(int(self.Port)))); err != nil {
		return err
	}
	if len(spec.Seeds) > 0 {
		if _, err := list.Join(spec.Seeds); err != nil {
			return err
		}
	}
	if err := meet(func() bool { return list.NumMembers() == len(memberNames) }); err != nil {
		return err
	}
	if err := say(true); err != nil {
		return err
	}
	decide := func() {
		v.next()
		r.queue.QueueBroadcast(r.message())
	}
	stop := make(chan struct{})
	var sending sync.WaitGroup
	if spec.Kind == "reliable" {
		decide = func() { v.next() }
		for _, to := range list.Members() {
			if to.Name != spec.Name {
				sending.Go(func() { r.send(list, to, stop) })
			}
		}
	}
	cpu, err := drive(in, decide)
	close(stop)
	sending.Wait()
	if err != nil {
		return err
	}
	result := v.result()
	result.CPU = cpu
	if err := say(result); err != nil {
		return err
	}
	return in.Decode(new(any))
}

// A rival is memberlist's delegate.
type rival struct {
	name  string
	v     *versions
	queue *memberlist.TransmitLimitedQueue
}

func (r *rival) message() versionMessage {
	b := binary.LittleEndian.AppendUint64(nil, r.v.newest())
	return versionMessage{r.name, append(b, r.name...)}
}

func (r *rival) send(list *memberlist.Memberlist, to *memberlist.Node, stop <-chan struct{}) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for sent := uint64(0); ; {
		select {
		case <-tick.C:
		case <-stop:
			return
		}
		if newest := r.v.newest(); newest > sent && list.SendReliable(to, r.message().b) == nil {
			sent = newest
		}
	}
}

func (*rival) NodeMeta(int) []byte           { return nil }
func (*rival) LocalState(bool) []byte        { return nil }
func (*rival) MergeRemoteState([]byte, bool) {}
func (r *rival) GetBroadcasts(o, l int) [][]byte {
	if r.queue == nil { // asked for while it is being made
		return nil
	}
	return r.queue.GetBroadcasts(o, l)
}

func (r *rival) NotifyMsg(b []byte) {
	if len(b) > 8 {
		r.v.arrive(string(b[8:]), binary.LittleEndian.Uint64(b))
	}
}

// A versionMessage is a broadcast that the next one of the same member replaces.
type versionMessage struct {
	name string
	b    []byte
}

func (m versionMessage) Name() string    { return m.name }
func (m versionMessage) Message() []byte { return m.b }
func (versionMessage) Finished()         {}
func (m versionMessage) Invalidates(other memberlist.Broadcast) bool {
	o, ok := other.(memberlist.NamedBroadcast)
	return ok && o.Name() == m.name
}
