// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func newStatus(t testing.TB, name string, incarnation uint64) *MemberStatuses {
	t.Helper()
	m, err := NewMemberStatuses(crdt.Replica{Name: name, Incarnation: incarnation})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func genStatus(rt *rapid.T) MemberStatus {
	text := func(label string, most int) string {
		return rapid.StringN(0, -1, most).Draw(rt, label)
	}
	amount := func(label string) float64 {
		return float64(rapid.Uint32().Draw(rt, label)) / 1000
	}
	m := MemberStatus{
		Zone: text("zone", 64), Region: text("region", 64), Version: text("version", 64),
		Number: rapid.Uint64().Draw(rt, "configuration"), Complete: rapid.Uint64().Draw(rt, "complete"), Applied: rapid.Uint64().Draw(rt, "applied"),
		Share: float64(rapid.IntRange(0, 1000).Draw(rt, "share")) / 1000,
		Level: amount("level"), Cap: amount("cap"), Lent: amount("lent"), Pinned: amount("pinned"),
		Unacked: rapid.Uint64().Draw(rt, "unacked"), SyncDelay: time.Duration(rapid.IntRange(0, 1e6).Draw(rt, "delay")) * time.Microsecond,
	}
	for range rapid.IntRange(0, 40).Draw(rt, "keys") {
		m.Keys = append(m.Keys, KeyStatus{
			Key: text("key", 128), Admitted: rapid.Uint64().Draw(rt, "admitted"), Denied: rapid.Uint64().Draw(rt, "denied"),
			Level: amount("key's level"), Cap: amount("key's cap"),
		})
	}
	return m
}

// What a process says arrives as it was said, and what does not fit is cut at
// both alike.
func TestMemberStatusesSay(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		a, b := newStatus(t, "a", 1), newStatus(t, "b", 1)
		said := genStatus(rt)
		a.Say(said)
		p, upto := a.Delta(0, nil, b.self, 0, maxStatus)
		if len(p) > maxStatus || upto != a.Mark(b.self) {
			rt.Fatalf("%d bytes, complete to %d of %d", len(p), upto, a.Mark(b.self))
		}
		if err := b.Merge(crdt.Contact{From: a.self, Now: sec, Sent: 1}, p); err != nil {
			rt.Fatal(err)
		}
		want, got := a.All(0, nil)[0], b.All(3*sec, nil)[0]
		if got.Heard != 2*sec {
			rt.Fatalf("heard %v ago", got.Heard)
		}
		got.Heard = 0
		if len(want.Keys) == 0 {
			want.Keys = nil
		}
		if !reflect.DeepEqual(got, want) {
			rt.Fatalf("said %+v\nheard %+v", want, got)
		}
		if len(want.Keys) < min(len(said.Keys), 2) {
			rt.Fatalf("%d of %d keys", len(want.Keys), len(said.Keys))
		}
	})
}

// Of packets that overtake each other the latest counts, and an earlier incarnation says
// nothing any more.
func TestMemberStatusesLatestCounts(t *testing.T) {
	a, b := newStatus(t, "a", 1), newStatus(t, "b", 1)
	var packets [][]byte
	for i := range 3 {
		a.Say(MemberStatus{Number: uint64(i)})
		p, _ := a.Delta(0, nil, b.self, 0, 4096)
		packets = append(packets, p)
	}
	for _, at := range []int{1, 2, 0, 2} {
		if err := b.Merge(crdt.Contact{From: a.self, Now: sec, Sent: time.Duration(at)}, packets[at]); err != nil {
			t.Fatal(err)
		}
	}
	if got := b.All(sec, nil)[0].Number; got != 2 {
		t.Errorf("configuration %d", got)
	}
	if p, upto := a.Delta(0, nil, b.self, a.Mark(b.self), 4096); len(p) != 0 || upto != a.Mark(b.self) {
		t.Errorf("%d bytes of no news", len(p))
	}
	if p, upto := a.Delta(0, nil, b.self, 0, 5); len(p) != 0 || upto != 0 {
		t.Errorf("%d bytes in a room of 5, complete to %d", len(p), upto)
	}
	if err := b.Merge(crdt.Contact{From: a.self, Now: 2 * sec, Sent: 3}, nil); err != nil || b.All(2*sec, nil)[0].Heard != 0 {
		t.Errorf("%v: a keep-alive was not heard", err)
	}
	again := newStatus(t, "a", 2)
	p, _ := again.Delta(0, nil, b.self, 0, 4096)
	_ = b.Merge(crdt.Contact{From: again.self, Now: 3 * sec, Sent: 1}, p)
	_ = b.Merge(crdt.Contact{From: a.self, Now: 4 * sec, Sent: 9}, packets[2])
	if got := b.All(4*sec, nil)[0]; got.Incarnation != 2 || got.Number != 0 || got.Heard != sec {
		t.Errorf("%+v", got)
	}
	b.Gone(0, a.self)
	if n := len(b.All(4*sec, nil)); n != 2 {
		t.Errorf("%d all: the end of an earlier incarnation took the later one along", n)
	}
	if n := len(b.All(3*sec+statusKeep+1, nil)); n != 1 {
		t.Errorf("%d all, one is silent for ten minutes", n)
	}
}

func TestMemberStatusesSkew(t *testing.T) {
	for _, c := range []struct {
		levels []float64
		want   float64
	}{
		{nil, 0},
		{[]float64{3, 3, 3}, 0},
		{[]float64{0, 10}, 0.5},
		{[]float64{10, 0, 5}, math.Sqrt(1. / 6)},
	} {
		all := []MemberStatus{{Level: 7}} // without a share
		for _, l := range c.levels {
			all = append(all, MemberStatus{Level: l, Cap: 10})
		}
		if got := Skew(all); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%v: %v, want %v", c.levels, got, c.want)
		}
	}
}

func TestMemberStatusesRefuse(t *testing.T) {
	if _, err := NewMemberStatuses(crdt.Replica{}); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
	m := newStatus(t, "a", 1)
	if err := m.Merge(crdt.Contact{From: crdt.Replica{Name: "a", Incarnation: 2}}, nil); !errors.Is(err, ErrSelf) {
		t.Error(err)
	}
	var many MemberStatus
	for i := range maxStatusKeys {
		many.Keys = append(many.Keys, KeyStatus{Key: fmt.Sprint(i)})
	}
	whole := appendStatus(nil, &many, 1)
	from := crdt.Contact{From: crdt.Replica{Name: "b", Incarnation: 1}}
	for _, b := range [][]byte{{9}, {wireVersion}, whole[:len(whole)-1], append(whole, 1, 'x', 0, 0, 0, 0), []byte(strings.Repeat("\xff", 40))} {
		if err := m.Merge(from, b); !errors.Is(err, ErrMalformed) {
			t.Errorf("% x: %v", b, err)
		}
	}
	if n := len(m.All(0, nil)); n != 1 {
		t.Errorf("%d all after what was refused", n)
	}
}

func FuzzMemberStatus(f *testing.F) {
	m := MemberStatus{Zone: "z", Version: "1", Share: 0.5, Level: 1.5, Cap: 3, Keys: []KeyStatus{{Key: "k", Admitted: 7}}}
	whole := appendStatus(nil, &m, 3)
	f.Add(whole)
	f.Add(whole[:len(whole)-1])
	f.Add([]byte{wireVersion, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := readStatus(b)
		if err != nil {
			return
		}
		if len(r.Keys) > maxStatusKeys || r.Share > 1 || r.Level < 0 {
			t.Fatalf("%+v", r)
		}
		again, err := readStatus(appendStatus(nil, &r.MemberStatus, r.num))
		if err != nil || len(b) <= maxStatus && len(again.Keys) != len(r.Keys) {
			t.Fatalf("%v: %+v came back as %+v", err, r, again)
		}
	})
}
