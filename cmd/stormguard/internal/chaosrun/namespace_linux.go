// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
)

// ownNetwork returns attributes that start a process in a network namespace of its own. Without
// root the process is root of a user namespace of its own.
func ownNetwork() *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if os.Getuid() != 0 {
		a.Cloneflags |= syscall.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return a
}

// tryNamespaces returns an error if this machine lacks a tool or a right for faults of the
// network.
func tryNamespaces() error {
	for _, args := range [][]string{{"ip", "link", "set", "lo", "up"}, {"nft", lossRules(5, []string{"9092"})}, {"nsenter", "--version"}} {
		cmd, err := tool(args...)
		if err == nil {
			cmd.SysProcAttr = ownNetwork()
			err = runs(cmd)
		}
		if err != nil {
			return fmt.Errorf("chaos: faults of the network need ip (iproute2), nft (nftables), nsenter (util-linux), and root or unprivileged user namespaces: %w", err)
		}
	}
	return nil
}

// tool makes a command. Its program may be in the directories for administrators.
func tool(args ...string) (*exec.Cmd, error) {
	for _, dir := range []string{"", "/usr/sbin/", "/sbin/"} {
		if path, err := exec.LookPath(dir + args[0]); err == nil {
			return exec.Command(path, args[1:]...), nil //nolint:noctx,gosec // short; the arguments are ours
		}
	}
	return nil, fmt.Errorf("there is no %s", args[0])
}

func runs(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// wake starts the loopback interface in the namespace of this process.
func wake() error {
	cmd, err := tool("ip", "link", "set", "lo", "up")
	if err != nil {
		return err
	}
	return runs(cmd)
}

// lossRules are nft rules that drop percent of the packets, each way or only from ports. On the
// loopback the packets of both directions are incoming.
func lossRules(percent int, ports []string) string {
	which := "meta l4proto tcp"
	if len(ports) > 0 {
		which = "tcp sport { " + strings.Join(ports, ", ") + " }"
	}
	return fmt.Sprintf("add table inet chaos; add chain inet chaos input { type filter hook input priority 0; }; "+
		"add rule inet chaos input %s numgen random mod 100 < %d counter drop", which, percent)
}

// enter makes a command that runs nft in the namespace of a process.
func enter(pid int, args ...string) (*exec.Cmd, error) {
	nft, err := tool("nft")
	if err != nil {
		return nil, err
	}
	in := []string{"nsenter", "--net", "--target", strconv.Itoa(pid)}
	if os.Getuid() != 0 {
		in = append(in, "--user", "--preserve-credentials")
	}
	return tool(append(append(in, nft.Path), args...)...)
}

// lose starts dropping packets of a process, by rules.
func lose(pid int, rules string) error {
	cmd, err := enter(pid, rules)
	if err != nil {
		return err
	}
	return runs(cmd)
}

var packets = regexp.MustCompile(`packets (\d+)`)

// dropped is the number of packets that a process has lost.
func dropped(pid int) (n int, err error) {
	cmd, err := enter(pid, "list", "chain", "inet", "chaos", "input")
	if err != nil {
		return 0, err
	}
	out, err := cmd.Output()
	if err != nil {
		return 0, err
	}
	m := packets.FindSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("chaos: nft counts no packets: %.200q", out)
	}
	return strconv.Atoi(string(m[1]))
}

// keepAll ends the loss of a process.
func keepAll(pid int) error {
	cmd, err := enter(pid, "delete", "table", "inet", "chaos")
	if err != nil {
		return err
	}
	return runs(cmd)
}

// timers is how often the kernel sent a packet again in the namespace of a process, because no
// answer came in time.
func timers(pid int) (fired int, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/netstat", pid))
	if err != nil {
		return 0, err
	}
	lines := strings.Split(string(text), "\n")
	for i := 1; i < len(lines); i++ {
		names, values := strings.Fields(lines[i-1]), strings.Fields(lines[i])
		if len(names) != len(values) || len(names) == 0 || names[0] != "TcpExt:" || values[0] != "TcpExt:" {
			continue
		}
		for k, name := range names {
			if name == "TCPTimeouts" || name == "TCPLossProbes" {
				n, err := strconv.Atoi(values[k])
				if err != nil {
					return 0, err
				}
				fired += n
			}
		}
		return fired, nil
	}
	return 0, errors.New("chaos: /proc has no counters of TCP")
}
