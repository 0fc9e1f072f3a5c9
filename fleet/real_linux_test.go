// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"syscall"
	"testing"
	"time"
)

const (
	staffRate  = 3000
	staffBurst = 300
)

// onLoopback are three processes of a fleet that have met.
func onLoopback(t *testing.T, network string, rate float64, burst int) *staff {
	s := &staff{t: t, begun: hostClock(), rate: rate, burst: burst}
	s.work(network)
	return s
}

// work starts the three, and waits until they have met.
func (s *staff) work(network string) {
	s.t.Helper()
	var seeds []string
	for _, name := range members {
		h := s.add(name, network, seeds)
		seeds = append(seeds, h.address())
	}
	s.meet()
}

// add starts one more process on the loopback.
func (s *staff) add(name, network string, seeds []string) *hired {
	s.t.Helper()
	h := hire(s.t, workerSpec{
		Name: name, Bind: "127.0.0.1:0", Network: network, Seeds: seeds, Roster: members, Rate: s.rate, Burst: s.burst,
		Register: s.register, OnSilence: s.onSilence,
	}, false)
	s.every = append(s.every, h)
	h.order(order{Start: true})
	s.until(20*time.Second, name+" listens", func() bool { return h.address() != "" })
	return h
}

func (s *staff) meet() {
	s.t.Helper()
	s.until(30*time.Second, "all see all", func() bool {
		for i, h := range s.every {
			if !whole(members[i])(h.now()) {
				return false
			}
		}
		return true
	})
}

// kill -9 of one of three: two go on; its name comes back as a new incarnation, which
// mints its share again; and whatever the three incarnations and the fourth were granted
// stays within the bound. The burst is five seconds of the rate, minted and spent
// before, so that an incarnation that began with more than nothing would show.
func TestKilled(t *testing.T) {
	const rate, burst, demand = 600, 3000, 3000
	for _, network := range networks() {
		t.Run(network, func(t *testing.T) {
			s := onLoopback(t, network, rate, burst)
			a, b, c := s.every[0], s.every[1], s.every[2]
			begun := hostClock()
			s.until(20*time.Second, "a whole burst is minted: a fleet begins without", func() bool { return hostClock()-begun > int64(burst*1e9/rate) })
			c.demand(demand)
			s.until(20*time.Second, "one that asks alone is lent to", func() bool { return c.within(s.begun, hostClock()) > burst/2 })
			a.demand(demand)
			b.demand(demand)
			s.until(20*time.Second, "the burst is spent", func() bool {
				now := hostClock()
				return a.within(s.begun, now)+b.within(s.begun, now)+c.within(s.begun, now) > burst*9/10
			})
			c.kill()
			killed := hostClock()
			s.until(20*time.Second, "the two know that it is silent", func() bool {
				return len(a.now().Fresh) == 1 && len(b.now().Fresh) == 1
			})
			born := hostClock()
			again := s.add("c", network, []string{a.address(), b.address()})
			again.demand(demand)
			s.until(30*time.Second, "all see all, and the new incarnation", func() bool {
				return whole("a")(a.now()) && whole("b")(b.now()) && whole("c")(again.now())
			})
			met := hostClock()
			s.until(20*time.Second, "it mints again", func() bool { return again.now().Minted > rate })
			back := hostClock()
			if got := a.within(killed, back) + b.within(killed, back); float64(got) < .3*rate*float64(back-killed)/1e9 {
				t.Errorf("the two were granted %d in %.1f s", got, float64(back-killed)/1e9)
			}
			minted, _ := again.first(0, func(s sight) bool { return s.Minted > 0 })
			t.Logf("started again %.2f s after the kill; minting %.2f s after that, all whole %.2f s after it", float64(born-killed)/1e9, float64(minted.At-born)/1e9, float64(met-born)/1e9)
			s.judge()
		})
	}
}

// A process that stands still for three seconds, while all ask, does nothing worse
// than to miss them.
func TestStopped(t *testing.T) {
	for _, network := range networks() {
		t.Run(network, func(t *testing.T) {
			s := onLoopback(t, network, staffRate, staffBurst)
			a, b, c := s.every[0], s.every[1], s.every[2]
			for _, h := range s.every {
				h.demand(staffRate)
			}
			time.Sleep(time.Second)
			if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			stopped := hostClock()
			time.Sleep(3 * time.Second)
			for _, h := range []*hired{a, b} {
				s.until(20*time.Second, "one that stands still is heard no more", func() bool { return !slices.Contains(h.now().Fresh, "c") })
			}
			on := hostClock()
			if err := c.cmd.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			s.rejoined(on)
			if n := c.within(stopped+1e9, on); n > 0 {
				t.Errorf("granted %d while it stood still", n)
			}
			s.until(20*time.Second, "it is granted its share again", func() bool {
				now := hostClock()
				return float64(c.within(now-1e9, now)) > .2*staffRate
			})
			s.judge()
		})
	}
}

// rejoinWithin is how long after packets flow again a fleet may need to be whole: a third of
// that where the machine is not busy.
const rejoinWithin = 30 * time.Second

// rejoined waits until all see all again, and says how long each needed.
func (s *staff) rejoined(from int64) {
	s.t.Helper()
	for i, h := range s.every {
		name := members[i]
		s.until(2*rejoinWithin, name+" sees all again", func() bool { _, ok := h.first(from, whole(name)); return ok })
		at, _ := h.first(from, whole(name))
		took := time.Duration(at.At - from)
		s.t.Logf("%s sees all again after %v, configuration %d", name, took.Round(time.Millisecond), at.Configuration)
		if took > rejoinWithin {
			s.t.Errorf("%s saw all again after %v only, want %v", name, took, rejoinWithin)
		}
	}
}

// networks are what a test is run over: UDP, and TCP in its long form.
func networks() []string {
	if full() {
		return []string{"udp", "tcp"}
	}
	return []string{"udp"}
}
