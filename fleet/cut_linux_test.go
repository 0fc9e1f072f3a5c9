// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The network of the tests that cut it:
//
//	namespace of a       hub: the test's          namespace of b
//	10.77.1.2 eth0 ──── w1  10.77.1.1
//	                        nftables: forward
//	                        w2  10.77.2.1 ──── eth0 10.77.2.2
//	                        w3  10.77.3.1 ──── eth0 10.77.3.2   (c)
//
// No namespace has a name: the hub is the test, started once more in one of its
// own, and each process is started by it in another. A namespace ends with the last
// process in it, cables and rules with the namespace, and each process with its
// parent, even if that is killed.

// hubEnv, if set, says that this is the hub: of which subtest, and of which process.
const hubEnv = "STORMGUARD_FLEET_HUB"

// inHub runs a subtest in a network namespace of its own, as root there, where this
// machine lets it.
func inHub(t *testing.T, test func(*testing.T)) {
	if hub, is := os.LookupEnv(hubEnv); is {
		if !strings.HasPrefix(hub, t.Name()+" ") {
			t.Skip("another shape's")
		}
		test(t)
		return
	}
	if err := tryNamespaces(t); err != nil {
		text := fmt.Sprintf("LEFT OUT: no cut by a packet filter; it needs ip (iproute2), nft (nftables), and root or unprivileged user namespaces: %v", err)
		if os.Getenv("CI") == "true" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	top, _, _ := strings.Cut(t.Name(), "/")
	args := []string{"-test.v", "-test.run=^" + top + "$"}
	if end, ok := t.Deadline(); ok {
		args = append(args, "-test.timeout="+max(time.Until(end)-10*time.Second, time.Minute).String())
	}
	mark := fmt.Sprintf("%s=%s %d", hubEnv, t.Name(), os.Getpid())
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), mark)
	cmd.SysProcAttr = ownNetwork()
	out, err := cmd.CombinedOutput()
	t.Logf("in a namespace of its own:\n| %s", bytes.ReplaceAll(bytes.TrimSpace(out), []byte("\n"), []byte("\n| ")))
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name()+" ")) {
		t.Errorf("it failed: %v", err)
	}
	if left := with(mark); len(left) > 0 {
		t.Errorf("processes %v are left", left)
	}
}

// with are the processes that have it in their environment.
func with(mark string) (pids []string) {
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		panic(err)
	}
	for _, path := range all {
		if env, err := os.ReadFile(path); err == nil && bytes.Contains(env, []byte(mark+"\x00")) {
			pids = append(pids, filepath.Base(filepath.Dir(path)))
		}
	}
	return pids
}

// ownNetwork starts a process in a network namespace of its own, and, without
// root, as root of a user namespace of its own.
func ownNetwork() *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Cloneflags: syscall.CLONE_NEWNET}
	if os.Getuid() != 0 {
		a.Cloneflags |= syscall.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return a
}

// tool is where a program is: those of an administrator are not in all paths.
func tool(name string) (string, error) {
	for _, dir := range []string{"", "/usr/sbin/", "/sbin/"} {
		if path, err := exec.LookPath(dir + name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("there is no %s", name)
}

// tryNamespaces says whether this machine has all that a cut needs.
func tryNamespaces(t *testing.T) error {
	ip, errIP := tool("ip")
	nft, errNFT := tool("nft")
	if err := errors.Join(errIP, errNFT); err != nil {
		return err
	}
	for _, args := range [][]string{
		{ip, "link", "add", "w1", "type", "veth", "peer", "name", "eth0"},
		{nft, "add table inet cut; add chain inet cut forward { type filter hook forward priority 0; }; add rule inet cut forward ip saddr 10.77.1.2 counter drop"},
	} {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.SysProcAttr = ownNetwork()
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// A hub is the test's end of all cables.
type hub struct {
	t        *testing.T
	ip, nft  string
	register string // a file: the filter does not cut it off
}

func (h *hub) run(args ...string) string {
	h.t.Helper()
	out, err := exec.CommandContext(h.t.Context(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		h.t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// newHub makes the namespace that the test is in a router.
func newHub(t *testing.T) *hub {
	h := &hub{t: t, register: filepath.Join(t.TempDir(), "register")}
	h.ip, _ = tool("ip") // tryNamespaces has looked
	h.nft, _ = tool("nft")
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.run(h.nft, "add table inet cut; add chain inet cut forward { type filter hook forward priority 0; }")
	return h
}

// address is that of the i-th process, from 1.
func address(i int) string { return fmt.Sprintf("10.77.%d.2", i) }

// add starts a process at the end of a cable of its own.
func (h *hub) add(s *staff, i int, network string) *hired {
	h.t.Helper()
	const port = ":7946"
	var seeds []string
	for k := range members {
		if k+1 != i {
			seeds = append(seeds, address(k+1)+port)
		}
	}
	w := hire(h.t, workerSpec{
		Name: members[i-1], Bind: address(i) + port, Network: network, Seeds: seeds, Roster: members, Rate: s.rate, Burst: s.burst, Register: h.register,
		Shell: []string{
			h.ip + " link set lo up",
			fmt.Sprintf("%s addr add %s/24 dev eth0", h.ip, address(i)),
			h.ip + " link set eth0 up",
			fmt.Sprintf("%s route add default via 10.77.%d.1", h.ip, i),
		},
	}, true)
	s.every = append(s.every, w)
	near := fmt.Sprint("w", i)
	h.run(h.ip, "link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", strconv.Itoa(w.cmd.Process.Pid))
	h.run(h.ip, "addr", "add", fmt.Sprintf("10.77.%d.1/24", i), "dev", near)
	h.run(h.ip, "link", "set", near, "up")
	w.order(order{Start: true})
	return w
}

// cut drops what matches; heal drops nothing any more, and says how many packets
// the rules have dropped.
func (h *hub) cut(matches ...string) {
	var rules []string
	for _, m := range matches {
		rules = append(rules, "add rule inet cut forward "+m+" counter drop")
	}
	h.run(h.nft, strings.Join(rules, "; "))
}

func (h *hub) heal() (dropped int) {
	for _, m := range regexp.MustCompile(`packets (\d+)`).FindAllStringSubmatch(h.run(h.nft, "list", "chain", "inet", "cut", "forward"), -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			h.t.Fatal(err)
		}
		dropped += n
	}
	h.run(h.nft, "flush", "chain", "inet", "cut", "forward")
	return dropped
}

// One of three is cut off from the others by a packet filter, not from the register. Each
// side goes on within its share, and all know what is changed meanwhile; after the heal all is
// whole soon without anybody's doing; and all that was granted is within the bound.
func TestCut(t *testing.T) {
	t.Parallel()
	both := []string{"ip saddr " + address(1), "ip daddr " + address(1)}
	for _, tt := range []struct {
		name, network string
		drop          []string // of a's packets
		deaf          bool     // a hears nothing
	}{
		{"udp", "udp", both, true},
		{"tcp", "tcp", both, true},
		{"one-way", "udp", both[:1], false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			inHub(t, func(t *testing.T) { cutOff(t, tt.network, tt.drop, tt.deaf) })
		})
	}
}

func cutOff(t *testing.T, network string, drop []string, deaf bool) {
	t.Helper()
	long := 12 * time.Second
	if full() {
		long = 90 * time.Second
	}
	h := newHub(t)
	s := &staff{t: t, begun: hostClock(), rate: staffRate, burst: staffBurst}
	for i := range members {
		h.add(s, i+1, network)
	}
	s.meet()
	a, b, c := s.every[0], s.every[1], s.every[2]
	s.lends(a, b, c)
	for _, w := range s.every {
		w.demand(staffRate)
	}
	time.Sleep(time.Second)

	h.cut(drop...)
	cut := hostClock()
	s.until(20*time.Second, "the sides do not hear each other", func() bool {
		return len(a.now().Fresh) == 0 && listed(b.now().Fresh...) == "c" && listed(c.now().Fresh...) == "b"
	})
	b.order(order{Propose: "meanwhile"})
	s.until(long, "a change is made", func() bool { return b.proposal() != "" })
	if got := b.proposal(); got != "2 <nil>" {
		t.Errorf("made meanwhile: %s", got)
	}
	time.Sleep(long - time.Duration(hostClock()-cut))
	s.until(20*time.Second, "the one that is cut off knows of the change, and nobody else's membership has it", func() bool {
		at := a.now()
		return at.Configuration == 2 && len(at.Fresh) == 0 && (!deaf || listed(at.Members...) == "a") && listed(b.now().Members...) == "b, c"
	})
	healing := hostClock()
	dropped := h.heal()
	healed := hostClock()
	if dropped == 0 {
		t.Error("the filter dropped nothing")
	}

	// What was borrowed across the cut is void after a lease of 1 s.
	from, took := cut+1_500_000_000, float64(healing-cut-1_500_000_000)/1e9
	for _, side := range []struct {
		name  string
		of    []*hired
		share float64
	}{{"a", []*hired{a}, 1. / 3}, {"b and c", []*hired{b, c}, 2. / 3}} {
		got, bound := 0, side.share*(s.rate*took+float64(s.burst))
		for _, w := range side.of {
			got += w.within(from, healing)
		}
		t.Logf("cut for %.1f s, %d packets dropped: %s granted %d in %.1f s, %.1f %% of its share's rate", float64(healing-cut)/1e9, dropped,
			side.name, got, took, 100*float64(got)/(side.share*s.rate*took))
		if float64(got) > bound {
			t.Errorf("%s was granted %d, above the %.0f of its share", side.name, got, bound)
		}
		if float64(got) < .1*side.share*s.rate*took { // nine processes may share two processors
			t.Errorf("%s was granted %d, and did not go on", side.name, got)
		}
	}

	s.rejoined(healed)
	for _, w := range s.every {
		if got := w.now(); got.Configuration != 2 || got.Complete != 2 {
			t.Errorf("it has not got what was changed meanwhile: %+v", got)
		}
	}
	s.lends(a, b, c) // the sections exchange again, both ways
	s.judge()
}
