// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/limiter"
)

// Members of a fleet are processes of their own, as they are where fleets work:
// this program once more.

// memberEnv, if set, makes the process a member: a memberSpec as JSON.
const memberEnv = "STORMGUARD_BENCH_MEMBER"

type memberSpec struct {
	Name    string        `json:"name"`
	Kind    string        `json:"kind"` // of memberKinds
	Network string        `json:"network"`
	Seeds   []string      `json:"seeds"`
	Limit   limiter.Limit `json:"limit"`
}

var memberNames = []string{"a", "b", "c"}

// memberKinds run a member: it says its address, then that it has met all others,
// then what came of each course that it was told to run. It ends with in.
var memberKinds = map[string]func(spec memberSpec, in *json.Decoder, say func(any) error) error{
	"idle":     runIdle,
	"gossip":   runGossip,
	"queue":    runMemberlist,
	"reliable": runMemberlist,
}

func runMember(text string, in io.Reader, out io.Writer) error {
	var spec memberSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return fmt.Errorf("%s is %q: %w", memberEnv, text, err)
	}
	run := memberKinds[spec.Kind]
	if run == nil {
		return fmt.Errorf("no member is a %q", spec.Kind)
	}
	err := run(spec, json.NewDecoder(in), json.NewEncoder(out).Encode)
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// config is that of a member's process.
func (m memberSpec) config() fleet.Config {
	c := fleet.Config{
		Fleet: "bench", Name: m.Name,
		Limits: fleet.Limits{Limit: m.Limit},
		Gossip: fleet.Gossip{Bind: "127.0.0.1:0", Network: m.Network, Seeds: m.Seeds},
	}
	for _, name := range memberNames {
		c.Limits.Roster.Members = append(c.Limits.Roster.Members, fleet.Share{Name: name})
	}
	return c
}

const (
	meetWithin = 30 * time.Second
	meetTick   = 5 * time.Millisecond
)

// meet waits until ok.
func meet(ok func() bool) error {
	for end := time.Now().Add(meetWithin); !ok(); time.Sleep(meetTick) {
		if time.Now().After(end) {
			return fmt.Errorf("the members have not met within %v", meetWithin)
		}
	}
	return nil
}

// met says whether a process hears all others, which have applied its configuration, and mints.
func met(p *fleet.Process) bool {
	n, s := 0, p.Status()
	for _, m := range s.Members {
		if m.State == "fresh" && m.Applied == s.Configuration.Number {
			n++
		}
	}
	c := s.Configuration
	return n == len(memberNames)-1 && c.Settled && c.Complete > 0 && c.Complete == c.Number
}

// runIdle is a member that asks for nothing.
func runIdle(spec memberSpec, in *json.Decoder, say func(any) error) error {
	p, err := fleet.Start(spec.config())
	if err != nil {
		return err
	}
	defer p.Close()
	if err := say(p.Addr().String()); err != nil {
		return err
	}
	if err := meet(func() bool { return met(p) }); err != nil {
		return err
	}
	if err := say(true); err != nil {
		return err
	}
	return in.Decode(new(any))
}

// A member is one as who started it has it.
type member struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	tell *json.Encoder
	said *json.Decoder
	addr string
}

// startMember returns when it listens.
func startMember(ctx context.Context, spec memberSpec) (*member, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	m := &member{cmd: exec.CommandContext(ctx, self)} //nolint:gosec // this program
	m.cmd.Env = append(os.Environ(), memberEnv+"="+string(text))
	m.cmd.Stderr = os.Stderr
	if m.in, err = m.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := m.cmd.Start(); err != nil {
		return nil, err
	}
	m.tell, m.said = json.NewEncoder(m.in), json.NewDecoder(bufio.NewReader(out))
	if err := m.said.Decode(&m.addr); err != nil {
		return nil, errors.Join(fmt.Errorf("member %s: %w", spec.Name, err), m.close())
	}
	return m, nil
}

// ready waits until it has met the others.
func (m *member) ready() error { return m.said.Decode(new(bool)) }

func (m *member) close() error { return errors.Join(m.in.Close(), m.cmd.Wait()) }

// closeAll ends members, the last one first.
func closeAll(members []*member) error {
	var errs []error
	for _, m := range slices.Backward(members) {
		errs = append(errs, m.close())
	}
	return errors.Join(errs...)
}
