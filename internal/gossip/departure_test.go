// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A room is a session that leaves, and its peers.
type room struct {
	a      *end
	others []*end
	now    time.Duration
	looks  bool // at all peers, for each packet
}

func newRoom(t *testing.T, peers int) *room {
	// What is due, and who is silent, differs by peer and lies far apart.
	r := &room{now: time.Second, a: newEndWith(t, Config{
		Cluster: "c", Self: crdt.Replica{Name: "a", Incarnation: 1}, Floor: 200 * ms, KeepAlive: 200 * ms,
	}, 1)}
	for i := range peers {
		b := newEnd(t, fmt.Sprintf("b%d", i), 1, uint16(2+i))
		r.others = append(r.others, b)
		r.hand(r.a.join(r.now, b))
		for range 4 {
			r.now += 10 * ms
			r.hand(b.wake(r.now))
			r.hand(r.a.wake(r.now))
		}
	}
	return r
}

// hand delivers packets, and the answers to them, and returns what a did about them.
func (r *room) hand(actions []Action) (did []Action) {
	for _, act := range actions {
		if act.Kind != Send {
			continue
		}
		for _, b := range r.others {
			switch {
			case act.Addr == b.addr:
				did = append(did, r.hand(b.take(r.now, r.a, act.Packet))...)
			case act.Addr == r.a.addr && string(r.sender(act.Packet)) == b.Session.cfg.Self.Name:
				if r.looks {
					r.a.departure = departure{}
				}
				did = append(did, r.a.take(r.now, b, act.Packet)...)
			}
		}
	}
	return did
}

func (r *room) sender(packet []byte) []byte {
	var h header
	_, _ = h.parse(packet)
	return h.from
}

// The packet that the last peer is heard in ends it.
func TestDepartureEndsWithTheLastAnswer(t *testing.T) {
	r := newRoom(t, 5)
	said := r.a.sends(r.a.Step(r.now, Event{Kind: Leave}, nil))
	for len(said) < 5 {
		r.now = r.a.Wake()
		said = append(said, r.a.wake(r.now)...)
	}
	r.now += ms
	for i, act := range said {
		if did := r.hand([]Action{act}); r.a.Session.over != (i == 4) {
			t.Fatalf("%d of 5 have answered, and it did %v", i+1, did)
		}
	}
}

// A packet of somebody who has died, sent again and again, keeps nobody from leaving.
func TestDepartureDoesNotWaitForARecording(t *testing.T) {
	a, b := met(t)
	recorded := written(b.wake(b.Wake()), a)
	a.take(70*ms, b, recorded)
	now := 100 * ms
	a.Step(now, Event{Kind: Leave}, nil)
	for !a.Session.over {
		if now += 100 * ms; now > 5*time.Second {
			t.Fatal("it still waits")
		}
		a.take(now, b, recorded)
		a.wake(now)
	}
}

// Who leaves and has not looked at all peers for a packet does and plans what it
// would have, had it looked.
func TestDepartureIsWhatALookWouldFind(t *testing.T) {
	ended := 0
	rapid.Check(t, func(rt *rapid.T) {
		peers := rapid.IntRange(1, 5).Draw(rt, "peers")
		quick, plain := newRoom(t, peers), newRoom(t, peers)
		plain.looks = true
		rooms := []*room{quick, plain}
		last := make([][]Action, 2) // what was said at the latest wake
		compare := func(what string, did [2][]Action) {
			if a, b := fmt.Sprint(did[0]), fmt.Sprint(did[1]); a != b || quick.a.Wake() != plain.a.Wake() {
				rt.Fatalf("%s: %s, wakes at %v; had it looked: %s, %v", what, a, quick.a.Wake(), b, plain.a.Wake())
			}
		}
		each := func(what string, do func(i int, r *room) []Action) {
			var did [2][]Action
			for i, r := range rooms {
				did[i] = do(i, r)
			}
			compare(what, did)
		}
		each("leave", func(i int, r *room) []Action {
			last[i] = r.a.sends(r.a.Step(r.now, Event{Kind: Leave}, nil))
			return last[i]
		})
		for range rapid.IntRange(1, 60).Draw(rt, "events") {
			who := rapid.IntRange(0, peers-1).Draw(rt, "who")
			after := rapid.SampledFrom([]time.Duration{0, ms, 50 * ms, 150 * ms, time.Second}).Draw(rt, "after")
			what := rapid.SampledFrom([]string{"wake", "wake", "ack", "ack", "speaks", "leaves too"}).Draw(rt, "what")
			each(what, func(i int, r *room) (did []Action) {
				r.now += after
				b := r.others[who]
				switch what {
				case "wake":
					r.now = max(r.now, min(r.a.Wake(), r.now+time.Second))
					last[i] = r.a.wake(r.now)
					return last[i]
				case "ack":
					for _, act := range last[i] {
						if act.Kind == Send && act.Addr == b.addr {
							did = append(did, r.hand([]Action{act})...)
						}
					}
				case "speaks":
					did = r.hand(b.wake(r.now))
				case "leaves too":
					did = r.hand(b.sends(b.Step(r.now, Event{Kind: Leave}, nil)))
				}
				return did
			})
			if quick.a.Session.over {
				ended++
				return
			}
		}
	})
	if ended == 0 {
		t.Error("none came to an end")
	}
}
