// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// overRegister are three processes of a fleet with a register in a file.
func overRegister(t *testing.T, onSilence SilencePolicy) *staff {
	s := &staff{
		t: t, begun: hostClock(), rate: staffRate, burst: staffBurst,
		register: filepath.Join(t.TempDir(), "register"), onSilence: onSilence,
	}
	s.work("udp")
	return s
}

// back waits until a process that was evicted has its third again, and checks that it
// said so, once if only an operator evicts, and that nobody found an error.
func (s *staff) back(h *hired, from int64) {
	s.t.Helper()
	third := func(v sight) bool {
		return v.Configuration >= 3 && v.Complete == v.Configuration && v.Share > .33 && v.Share < .34 && !v.Fenced
	}
	s.until(20*time.Second, "it has its share again", func() bool { _, ok := h.first(from, third); return ok })
	at, _ := h.first(from, third)
	s.t.Logf("it has its share again after %v, by configuration %d", time.Duration(at.At-from).Round(time.Millisecond), at.Configuration)
	s.until(20*time.Second, "all know", func() bool {
		for _, w := range s.every {
			if !third(w.now()) {
				return false
			}
		}
		return true
	})
	now := hostClock()
	h.demand(staffRate)
	s.until(20*time.Second, "it is granted its share", func() bool { return h.within(now, hostClock()) > staffRate/4 })
	// By Majority it is evicted again if a busy machine lets it stand still again.
	if said := h.log("evicted although it runs"); len(said) < 1 || len(said) > 1 && s.onSilence == Hold || len(h.log("level=WARN")) < 1 {
		s.t.Errorf("it said %q", said)
	}
	for _, w := range s.every {
		if lines := w.log("level=ERROR"); len(lines) > 0 {
			s.t.Errorf("%s", lines)
		}
	}
}

// With Majority a process that stands still for 1.2 s is evicted, and comes back by
// itself. Nobody is over the bound meanwhile.
func TestPausedComesBack(t *testing.T) {
	s := overRegister(t, Majority)
	a, b, c := s.every[0], s.every[1], s.every[2]
	for _, h := range s.every {
		h.demand(staffRate)
	}
	time.Sleep(time.Second)
	if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped := hostClock()
	s.until(20*time.Second, "it is evicted, and the others have its share", func() bool {
		return a.now().Share == .5 && b.now().Share == .5 && a.now().Complete == a.now().Configuration
	})
	time.Sleep(1200*time.Millisecond - time.Duration(hostClock()-stopped))
	on := hostClock()
	if err := c.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	s.back(c, on)
	s.judge()
}

// An operator evicts a process that runs: it comes back by itself, as the same incarnation, and
// does not end.
func TestEvictedComesBack(t *testing.T) {
	s := overRegister(t, Hold)
	a, c := s.every[0], s.every[2]
	asked := hostClock()
	a.order(order{Evict: "c"})
	s.until(20*time.Second, "it is evicted", func() bool { return a.proposal() != "" })
	if got := a.proposal(); got != "2 <nil>" {
		t.Errorf("evicted: %s", got)
	}
	s.back(c, asked)
}
