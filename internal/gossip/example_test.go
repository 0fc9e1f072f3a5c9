// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// tally is a section: a count that only its own process raises, and the counts
// that were heard of others.
type tally struct {
	own   uint64
	heard map[string]uint64
}

func (t *tally) Mark(crdt.Replica) uint64 { return t.own }

func (t *tally) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) ([]byte, uint64) {
	if since == t.own || room < 8 {
		return b, since
	}
	return binary.LittleEndian.AppendUint64(b, t.own), t.own
}

func (t *tally) Merge(c crdt.Contact, b []byte) error {
	if len(b) != 8 {
		return errors.New("tally: not 8 bytes")
	}
	t.heard[c.From.Name] = max(t.heard[c.From.Name], binary.LittleEndian.Uint64(b))
	return nil
}

func (t *tally) Gone(_ time.Duration, p crdt.Replica) { delete(t.heard, p.Name) }

// Two sessions and a driver that is no more than a loop: what one wants sent is
// the other's next event.
func ExampleSession() {
	tallies := [2]*tally{{heard: map[string]uint64{}}, {heard: map[string]uint64{}}}
	addrs := [2]netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:7946"), netip.MustParseAddrPort("10.0.0.2:7946")}
	var sessions [2]*gossip.Session
	for i := range sessions {
		var err error
		sessions[i], err = gossip.New(gossip.Config{
			Cluster: "orders",
			Self:    crdt.Replica{Name: fmt.Sprint("pod-", i), Incarnation: 1},
		}, gossip.WithSection("tally", tallies[i]))
		if err != nil {
			panic(err)
		}
	}

	now := time.Millisecond
	step := func(i int, ev gossip.Event) {
		for actions := sessions[i].Step(now, ev, nil); len(actions) > 0; {
			now += time.Millisecond
			packet := gossip.Event{Kind: gossip.Packet, Addr: addrs[i], Packet: actions[0].Packet}
			i = 1 - i
			actions = sessions[i].Step(now, packet, nil)
		}
	}
	step(0, gossip.Event{Kind: gossip.Join, Addr: addrs[1]})
	tallies[0].own = 5
	for range 3 {
		now = max(now, min(sessions[0].Wake(), sessions[1].Wake()))
		step(0, gossip.Event{Kind: gossip.Wake})
		step(1, gossip.Event{Kind: gossip.Wake})
	}
	fmt.Println("pod-1 heard", tallies[1].heard)
	fmt.Println("pod-1 has acknowledged all but", sessions[0].Stats(now).Unacked)
	// Output:
	// pod-1 heard map[pod-0:5]
	// pod-1 has acknowledged all but 0
}
