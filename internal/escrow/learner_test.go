// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"fmt"
	"testing"
	"time"
)

// withLearners is a fleet of which some mint and the others only borrow, and these
// learners' demand: of each a message now and then, that does not wait.
func withLearners(t *testing.T, minting, learners int, l Limit) (f *fleet, learner func(time.Duration) int) {
	cfg := Config{Fleet: "f", Limit: l, Roster: Roster{Learners: true}}
	for i := range minting {
		cfg.Roster.Members = append(cfg.Roster.Members, Member{Name: fmt.Sprintf("n%02d", i)})
	}
	f = newFleetOf(t, minting+learners, cfg, 1)
	return f, func(time.Duration) int { return minting + f.rand.IntN(learners) }
}

// Who mints nothing has to have borrowed a token before a message comes. A forecast
// of one message now and then is unsure, and asking for little by it left a quarter
// of the rate with those who mint.
func TestSparseLearners(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	l := Limit{Rate: 1000, Burst: 500} // a message in 42 ms, a step in 50 ms
	f, learner := withLearners(t, 10, 40, l)
	f.run(14*time.Second, 1.2*l.Rate, learner)
	err := f.worst(2*time.Second, f.now)
	t.Logf("error %+.2f %%, over %.1f", 100*err, f.over)
	if err < -.02 || err > .001 || f.over > 1e-6 {
		t.Errorf("error %+.2f %%, %v over; want within 2 %% and none", 100*err, f.over)
	}
}

// Half a token is never spent, and a learner that is asked all the time is never quiet.
// While a configuration is under way it goes back, or those who lose by it could not say for
// a whole lease that they keep within it.
func TestPartsOfTokensGoToTheOwner(t *testing.T) {
	f, learner := withLearners(t, 1, 4, Limit{Rate: 1000, Burst: 500})
	f.run(4*time.Second, 1000, learner)
	s := f.nodes[1]
	r := f.key(s)
	f.down = func(time.Duration, int, int) bool { return true } // nothing more is lent
	f.pass(f.now + 20*ms)
	r.spend(r.held - micro/2)
	ask := func(steps int) {
		for end := f.now + time.Duration(steps)*r.pace; f.now < end; {
			f.pass(f.now + r.pace/5)
			if s.take(r, micro) {
				t.Fatal("half a token served somebody")
			}
			f.settleNode(1)
		}
	}
	if ask(3); r.held != micro/2 {
		t.Fatalf("%d is held while no configuration is under way", r.held)
	}
	f.adopt(changed(f.cfg.Configuration(), func(c *Configuration) { c.Roster = rosterOf("n00 n01"); c.Roster.Learners = true }))
	if ask(2); r.held != 0 {
		t.Errorf("%d is held two steps after a configuration came", r.held)
	}
}
