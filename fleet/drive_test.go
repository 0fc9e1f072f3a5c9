// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// What a process says of itself is told when it has changed, as often as the others
// bear, and otherwise often enough not to be forgotten.
func TestSays(t *testing.T) {
	t.Parallel()
	for others, apart := range map[int]time.Duration{2: time.Second, 40: time.Second, 199: 5 * time.Second, 999: 25 * time.Second} {
		for _, changes := range []bool{false, true} {
			var d driver
			told := 0
			s := fleetstate.MemberStatus{Level: 1, Keys: []fleetstate.KeyStatus{{Key: "k", Level: 1}}}
			const span = 10 * time.Minute
			for now := time.Second; now <= span; now += statusEvery {
				s.Unacked, s.SyncDelay = uint64(now), now
				if changes {
					s.Keys = []fleetstate.KeyStatus{{Key: "k", Level: float64(now)}}
				}
				if d.says(now, &s, others) {
					told++
				}
			}
			want := int(span/statusRepeat) + 1
			if changes {
				want = int(span / apart)
			}
			if told < want-1 || told > want+1 {
				t.Errorf("%d others, changes %v: told %d times in %v, want %d", others, changes, told, span, want)
			}
		}
	}
}

// A clock that jumps ahead is counted, though one was as far ahead whose process has gone. That one
// is not, when it is back.
func TestSampleClocks(t *testing.T) {
	t.Parallel()
	wall, self := time.Unix(1_800_000_000, 0), crdt.Replica{Name: "b", Incarnation: 1}
	journal := func(of crdt.Replica, ahead time.Duration) *fleetstate.Journal {
		j, err := fleetstate.NewJournal(fleetstate.JournalConfig{}, of, func() time.Time { return wall.Add(ahead) })
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	gone := crdt.Replica{Name: "c", Incarnation: 1}
	a, b, c := journal(crdt.Replica{Name: "a", Incarnation: 1}, 0), journal(self, 300*time.Millisecond), journal(gone, 400*time.Millisecond)
	violationsOf := func(j *fleetstate.Journal, by crdt.Replica) (n uint64) {
		t.Helper()
		if err := j.Add(fleetstate.Entry{Kind: fleetstate.EntryStarted}); err != nil {
			t.Fatal(err)
		}
		delta, _ := j.Delta(0, nil, crdt.Replica{Name: "a", Incarnation: 1}, 0, 4096)
		if err := a.Merge(crdt.Contact{From: by}, delta); err != nil {
			t.Fatal(err)
		}
		_, _, n = a.Clock(by)
		return n
	}
	violations := func() uint64 { t.Helper(); return violationsOf(b, self) }
	peers := []gossip.Peer{
		{Replica: gone, State: gossip.Lost, Heard: time.Minute, Offset: 400 * time.Millisecond, HasOffset: true},
		{Replica: self, HasOffset: true}, // from before the jump
	}
	sampleClocks(a, peers)
	if n := violations(); n != 0 {
		t.Errorf("beside one that may be back: %d violations", n)
	}
	peers[0].Heard = time.Hour
	sampleClocks(a, peers)
	if n := violations(); n != 1 {
		t.Errorf("beside one that has gone: %d violations, want 1", n)
	}
	sampleClocks(a, peers) // each second
	if n := violationsOf(c, gone); n != 0 {
		t.Errorf("of one that is back: %d violations", n)
	}
	if n := violations(); n != 1 {
		t.Errorf("beside one that is back: %d violations, want 1", n)
	}
}
