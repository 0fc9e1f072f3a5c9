// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import "testing"

// Who is next: one that wants to, has not lately ended a round, and has probed least in
// it; and nobody a second time once enough have passed.
func TestRoundNext(t *testing.T) {
	at := Position{Gen: 3, Round: 5}
	wants := func(passes, failed uint32) *Vote { return &Vote{Wants: true, At: at, Passes: passes, Failed: failed} }
	first, last := "a", "b" // by rendezvous
	if rank("q", at, "b") < rank("q", at, "a") {
		first, last = last, first
	}
	for _, c := range []struct {
		what    string
		votes   map[string]*Vote
		skipped string
		next    string
		passed  int
	}{
		{"nobody", nil, "", "", 0},
		{"by rendezvous", map[string]*Vote{"a": wants(0, 0), "b": wants(0, 0)}, "", first, 0},
		{"who has ended one is last", map[string]*Vote{first: wants(0, 2), last: wants(0, 0)}, "", last, 0},
		{"also after one that probed", map[string]*Vote{first: wants(0, 2), last: wants(1, 0)}, "", last, 1},
		{"less probes after that", map[string]*Vote{first: wants(1, 2), last: wants(0, 2)}, "", last, 1},
		{"skipped", map[string]*Vote{"a": wants(0, 0), "b": wants(0, 0)}, first, last, 0},
		{"skipped counts", map[string]*Vote{"a": wants(2, 0)}, "a", "", 2},
		{"who wants nothing counts", map[string]*Vote{"a": {At: at, Passes: 2}, "b": wants(0, 0)}, "", "b", 2},
		{"who wants nothing is not next", map[string]*Vote{"a": {At: at}}, "", "", 0},
		{"gone", map[string]*Vote{"a": {Wants: true, At: at, Passes: 2, Gone: true}}, "", "", 0},
		{"before the last close", map[string]*Vote{"a": {Wants: true, At: Position{Gen: 2, Round: 5}, Passes: 2}}, "", "", 0},
		{"of another round", map[string]*Vote{"a": {Wants: true, At: Position{Gen: 3, Round: 4}, Passes: 2}}, "", "a", 0},
		{"not in the roster", map[string]*Vote{"x": wants(0, 0)}, "", "", 0},
		{"again while too few passed", map[string]*Vote{"a": wants(1, 0), "b": wants(1, 0)}, "", first, 2},
		{"not again when enough have", map[string]*Vote{"a": wants(2, 0), "b": wants(1, 0)}, "", "", 3},
		{"but a first time", map[string]*Vote{"a": wants(3, 0), "b": wants(0, 9)}, "", "b", 3},
	} {
		r := Round{Scope: "q", At: at, Names: []string{"a", "b"}, Skipped: map[string]struct{}{c.skipped: {}}}
		next, passed := r.Next(3, func(name string) *Vote { return c.votes[name] })
		if next != c.next || passed != c.passed {
			t.Errorf("%s: %q is next and %d passed, want %q and %d", c.what, next, passed, c.next, c.passed)
		}
	}
}

// Who has yet to probe is outvoted only if each of them has ended a round, and they are few.
func TestRoundOutvoted(t *testing.T) {
	at := Position{Gen: 3, Round: 5}
	passed, broken, untried := &Vote{Wants: true, At: at, Passes: 10}, &Vote{Wants: true, At: at, Failed: 4}, &Vote{Wants: true, At: at}
	for _, c := range []struct {
		what    string
		votes   []*Vote
		skipped string
		want    bool
	}{
		{"one broken", []*Vote{passed, broken, nil}, "", true},
		{"as many as a quorum", []*Vote{passed, broken, broken}, "", false},
		{"one who has not tried", []*Vote{passed, broken, untried}, "", false},
		{"one who let its turn go", []*Vote{passed, broken, untried}, "c", true},
		{"one without messages", []*Vote{passed, broken, {At: at}}, "", true},
		{"one that gave the scope up", []*Vote{passed, broken, {Wants: true, At: at, Gone: true}}, "", true},
		{"of before the last close", []*Vote{passed, broken, {Wants: true, At: Position{Gen: 2, Round: 5}}}, "", true},
		{"passed in another round", []*Vote{passed, broken, {Wants: true, At: Position{Gen: 3, Round: 4}, Passes: 10}}, "", false},
	} {
		names := []string{"a", "b", "c"}
		r := Round{Scope: "q", At: at, Names: names, Skipped: map[string]struct{}{c.skipped: {}}}
		if got := r.Outvoted(2, func(name string) *Vote { return c.votes[name[0]-'a'] }); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

// Shares differ by process and round, and are in [0, 1).
func TestRoundShare(t *testing.T) {
	seen := map[float64]bool{}
	for round := range uint32(100) {
		r := Round{Scope: "q", At: Position{Gen: 1, Round: round}}
		for _, name := range []string{"a", "b", "c"} {
			s := r.Share(name)
			if s < 0 || s >= 1 || seen[s] {
				t.Fatalf("the share of %s in round %d is %v", name, round, s)
			}
			seen[s] = true
		}
	}
}
