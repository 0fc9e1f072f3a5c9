// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/words"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/limiter"
)

// trial starts the members a and b of a fleet, and serves a's handler.
func trial(t *testing.T) (a, b *fleet.Process, url string) {
	t.Helper()
	var store register.Memory
	start := func(name string, seeds ...string) *fleet.Process {
		p, err := fleet.Start(fleet.Config{
			Fleet: "trial", Name: name, Program: "v9",
			Limits: fleet.Limits{
				Limit:  limiter.Limit{Rate: 1000, Burst: 100},
				Roster: fleet.Roster{Learners: true, Members: []fleet.Share{{Name: "a"}, {Name: "b"}}},
			},
			Gossip: fleet.Gossip{Zone: "z1", Region: "r1", Bind: "127.0.0.1:0", Seeds: seeds},
		}, fleet.WithRegister(&store))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		return p
	}
	a = start("a")
	b = start("b", a.Addr().String())
	server := httptest.NewServer(a.Handler())
	t.Cleanup(server.Close)
	return a, b, server.URL
}

func soon(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// An operator sees the fleet, changes it, and is told what is wrong.
func TestFleetCommands(t *testing.T) {
	a, b, url := trial(t)
	soon(t, "both have told of themselves", func() bool {
		s := a.Status()
		return len(s.Members) == 2 && s.Members[1].Version == "v9" && s.Members[0].Share == 0.5 && s.Members[1].Share == 0.5 && s.Configuration.Settled
	})
	soon(t, "b admits", func() bool { return b.Key("orders").AllowN(30) })
	soon(t, "a has heard of it", func() bool {
		m := a.Status().Members[1]
		return m.State == "fresh" && len(m.Keys) == 1 && m.Keys[0].Admitted == 30
	})
	for _, c := range []struct {
		args           string
		code           int
		stdout, stderr string // patterns
	}{
		{"", exitOK, `(?s)trial, as a sees it.*configuration 1, complete to 1: 1000/s, burst 100\n.*a +r1/z1 +self +50.0 %.*b +r1/z1 +fresh +50.0 %.*orders`, `^$`},
		{"set --rate 500 --burst 50", exitOK, `^changed: configuration 2, after 1\n$`, `^$`},
		{"set --key x --rate 5 --burst 5 --weight b=3", exitOK, `^changed: configuration 3, after 2\n$`, `^$`},
		{"set --key x --unset --json", exitOK, `^\{"number":4\}\n$`, `^$`},
		{"reset", exitOK, `^all buckets filled: configuration 5, after 4\n$`, `^$`},
		{"reset --number 4", exitError, `^$`, `number 4 was to be changed, the newest is 5`},
		{"evict b --number 3", exitError, `^$`, `number 3 was to be changed, the newest is 5`},
		{"set --rate 0 --burst 1", exitError, `^$`, `Limit.Rate: 0 is not in \[0.001, 1e\+09\]`},
		{"set --rate 5", exitUsage, `^$`, `--rate and --burst: must be given together`},
		{"set", exitUsage, `^$`, `nothing to change`},
		{"set --key= --rate 5 --burst 5", exitUsage, `^$`, `--key "": must not be empty`},
		{"set --unset", exitUsage, `^$`, `--unset: needs --key`},
		{"evict", exitUsage, `^$`, `accepts 1 arg`},
		{"evict nobody", exitError, `^$`, `"nobody" is no other member`},
		{"--json", exitOK, `^\{"fleet":"trial","name":"a".*"weight":3`, `^$`},
		{"quarantine add --header tenant=acme --why ticket_4711 --by ann", exitOK, `^in quarantine: header:tenant=acme; 1 rule\n$`, `^$`},
		{"quarantine add --cause v2:32c3a1eebe9e4b6b --for 1h", exitOK, `^in quarantine: cause=v2:32c3a1eebe9e4b6b; 2 rules\n$`, `^$`},
		// Rules of one millisecond are listed by their text.
		{"quarantine list", exitOK, `(?s)^RULE +BY +SINCE +UNTIL +WHY\n(cause=v2[^\n]*\n)?header:tenant=acme +ann +20\S+Z +20\S+Z +ticket_4711\n`, `^$`},
		{"quarantine list --json", exitOK, `^\[.*\{"rule":"header:tenant=acme","by":"ann","why":"ticket_4711","at":"20`, `^$`},
		{"", exitOK, `(?s)QUARANTINE +BY +UNTIL +WHY\n(cause=v2[^\n]*\n)?header:tenant=acme +ann`, `^$`},
		{"quarantine remove --header tenant=acme --by bob", exitOK, `^no longer in quarantine: header:tenant=acme; 1 rule\n$`, `^$`},
		{"quarantine remove --cause v2:32c3a1eebe9e4b6b --json", exitOK, `^\[\]\n$`, `^$`},
		{"quarantine remove --key acmee", exitError, `^$`, `key=acmee is not in quarantine`},
		{"quarantine add", exitUsage, `^$`, `--key, --header, --cause: give one of them`},
		{"quarantine add --key k --cause c", exitUsage, `^$`, `give one of them`},
		{"quarantine add --header tenant", exitUsage, `^$`, `--header "tenant": is not NAME=VALUE`},
		{"quarantine add --key k --for 169h", exitUsage, `^$`, `--for 169h0m0s: is not in \(0, 168h0m0s\]`},
		{"quarantine add --key k --why " + strings.Repeat("x", 129), exitError, `^$`, `Why: 129 bytes are not in \[0, 128\]`},
		{"journal", exitOK, `(?s)quarantined +header:tenant=acme +by ann: ticket_4711.*released +header:tenant=acme +by bob`, `^$`},
		{"journal", exitOK, `(?s)started +a.*configuration +2 +a +500/s burst 50.*RESET +5 +a +all buckets filled`, `^$`},
		{"journal --json", exitOK, `^\[\{"at":"20`, `^$`},
	} {
		var stdout, stderr bytes.Buffer
		code := run(append(append([]string{"fleet"}, strings.Fields(c.args)...), "--url", url), &stdout, &stderr)
		if code != c.code || !regexp.MustCompile(c.stdout).MatchString(stdout.String()) || !regexp.MustCompile(c.stderr).MatchString(stderr.String()) {
			t.Errorf("fleet %s: %d\n%s%s\nwant %d %s %s", c.args, code, stdout.String(), stderr.String(), c.code, c.stdout, c.stderr)
		}
	}
	var stdout, stderr bytes.Buffer
	if code := run([]string{"fleet", "--url", "http://127.0.0.1:1"}, &stdout, &stderr); code != exitError || !strings.Contains(stderr.String(), "nobody answers for a fleet at http://127.0.0.1:1") {
		t.Errorf("%d %s", code, stderr.String())
	}
	other := httptest.NewServer(nil)
	defer other.Close()
	if code := run([]string{"fleet", "--url", other.URL}, &stdout, &stderr); code != exitError || !strings.Contains(stderr.String(), "404 Not Found, which no fleet does") {
		t.Errorf("%d %s", code, stderr.String())
	}
}

// What is printed of a fleet in trouble says so.
func TestFleetInTrouble(t *testing.T) {
	before := fleet.Status{Members: []fleet.Member{{Name: "a", Keys: []fleet.Key{{Key: "k", Admitted: 100, Denied: 10}, {Key: "l"}}}, {Name: "b", Keys: []fleet.Key{{Key: "k", Admitted: 900}}}}}
	s := fleet.Status{
		Fleet: "f", Name: "a", Stranded: 0.5,
		Configuration: fleet.Configuration{Number: 7, Complete: 6, Lacking: []string{"b"}, Settled: true, Evicted: true, Away: "unplugged", Problem: "differs"},
		Members: []fleet.Member{
			{Name: "a", State: "self", Roster: true, Number: 7, Applied: 6, Keys: []fleet.Key{{Key: "k", Admitted: 300, Denied: 20, Level: 1, Cap: 5}, {Key: "l", Admitted: 700}}},
			{Name: "b", State: "lost", Heard: 90 * time.Second, LoansRefused: 7, Keys: []fleet.Key{{Key: "k", Admitted: 3, Level: 1, Cap: 5}}},
		},
		Scopes: []fleet.Scope{{Name: "g/t/0", State: "open", Held: true, Cause: "failures"}},
		Totals: []fleet.Total{{Key: "g/t", Handled: 1000, Failed: 30, DeadLettered: 2, Processes: 3}},
	}
	var b bytes.Buffer
	if err := printFleet(&b, words.English, &s, rates(&before, &s, 2*time.Second)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"stranded share 50.0 %", "NOT APPLIED YET by b", "EVICTED", "REGISTER AWAY: unplugged", "PROBLEM: differs", "lost 1m30s, learner, BREAKS THE BOOKS: 7 loans refused", "7 (applied 6)",
		"l    350/s     0/s     0      0\nk    100/s     5/s     2      10\n", "g/t/0  open   true  failures", "g/t    1000     30            2             3\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in:\n%s", want, b.String())
		}
	}
	s.Configuration.Settled = false
	s.Configuration.Problem = "differs\x1b[2J" // a peer's words must not steer the terminal
	b.Reset()
	if err := printFleet(&b, words.English, &s, nil); err != nil || !strings.Contains(b.String(), "NOT JOINED") || !strings.Contains(b.String(), `PROBLEM: differs\x1b[2J`) {
		t.Errorf("%v %q", err, b.String())
	}
}

// What is wrong with a register's flags is said by their names, and without a password.
func TestFleetRegisterFlags(t *testing.T) {
	for args, want := range map[string]string{
		"--register gopher://u:secret@h/x":                              `--register "gopher://...@h/x": must be file:PATH, etcd://`,
		"--register-ca ca.pem":                                          "--register: must be given with",
		"--register kafka://u:secret@h:1":                               "--register kafka://...@...: must be without a user: give --register-user",
		"--register etcd:u:secret@h:1":                                  "--register etcd://...@...: must be without a user: give --register-user",
		"--register etcd://":                                            `--register "etcd://": has no host: must be file:PATH`,
		"--register kafka:h:1":                                          `--register "kafka:h:1": has no host: must be file:PATH`,
		"--register amqp:///orders":                                     `--register "amqp:///orders": has no host: must be file:PATH`,
		"--register file:" + t.TempDir() + "/r":                         "Limits.Roster.Members: 0 is not in [1, 1024] with a register",
		"--register etcd://h:1 --register-user u":                       "--register-user and --register-password-file: must be given together",
		"--register nats://h:1 --register-cert c":                       "--register-cert and --register-key: must be given together",
		"--register etcd://h:1 --register-sasl plain":                   `--register-sasl "plain": is for Kafka`,
		"--register kafka://h:1 --register-ca none.pem":                 "--register-ca: open none.pem",
		"--register file: --roster a,b":                                 "--register: register: file: the path is empty",
		"--register postgres://u:secret@h:port/db --roster a,b":         "--register: the URL cannot be read",
		"--register nats://h:1 --fleet a.b --roster a,b":                `Bucket: "stormguard-a.b" is not`,
		"--register file:" + t.TempDir() + "/r --number 3 --roster a,b": "Number: 3 is not in [0, 0] with a register",
	} {
		var stdout, stderr bytes.Buffer
		code := run(append([]string{"fleet", "run", "--name", "a"}, strings.Fields(args)...), &stdout, &stderr)
		if code == exitOK || !strings.Contains(stderr.String(), want) || strings.Contains(stderr.String(), "secret") {
			t.Errorf("%s: %d\n%s\nwant %s", args, code, stderr.String(), want)
		}
	}
}

// keygen prints a key that fleet run reads, and nothing else.
func TestFleetKeygen(t *testing.T) {
	var keys [2]string
	for i := range keys {
		var stdout, stderr bytes.Buffer
		if code := run([]string{"fleet", "keygen"}, &stdout, &stderr); code != exitOK || stderr.Len() != 0 {
			t.Fatalf("%d %s", code, stderr.String())
		}
		keys[i] = stdout.String()
		if b, err := base64.StdEncoding.DecodeString(strings.TrimSuffix(keys[i], "\n")); err != nil || len(b) != 32 {
			t.Fatalf("%q: %v", keys[i], err)
		}
	}
	if keys[0] == keys[1] {
		t.Error("the same key twice")
	}
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte(keys[0]), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readKeys(file); err != nil {
		t.Error(err)
	}
}

// Nothing is opened beyond loopback without a key or a token and TLS.
func TestFleetRunClosed(t *testing.T) {
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("ops 0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--bind :0":                    "fleet keygen",
		"--bind 127.0.0.1:0 --http :0": "--http-tokens",
		"--bind 127.0.0.1:0 --http :0 --http-tokens " + tokens: "--http-cert",
	} {
		var stdout, stderr bytes.Buffer
		all := append([]string{"fleet", "run", "--name", "a", "--roster", "a,b"}, strings.Fields(args)...)
		if code := run(all, &stdout, &stderr); code != exitUsage || !strings.Contains(stderr.String(), want) {
			t.Errorf("%s: %d %s", args, code, stderr.String())
		}
	}
}

// With a token and TLS the handler answers at any address, and to nobody else.
func TestFleetToken(t *testing.T) {
	s := newSecrets(t)
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	right, wrong := write("right", "ops 0123456789abcdef # Ann's\n"), write("wrong", "ops fedcba9876543210\n")
	ctx, cancel := context.WithCancel(t.Context())
	var out syncBuffer
	var ended sync.WaitGroup
	defer ended.Wait()
	defer cancel()
	r := fleetRun{
		name: "a", fleet: "trial", roster: []string{"a"}, bind: "127.0.0.1:0", http: "0.0.0.0:0", httpTokens: right, httpCert: s.cert, httpKey: s.key,
		network: "udp", key: "k", rate: 1000, burst: 100, quiet: true,
	}
	ended.Go(func() { _ = r.run(ctx, &out, io.Discard) })
	var port string
	soon(t, "it answers", func() bool {
		m := regexp.MustCompile(`a answers at https://\S+:(\d+)\n`).FindStringSubmatch(out.String())
		if m != nil {
			port = m[1]
		}
		return m != nil
	})
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--token-file", right, "--ca", s.ca}, exitOK, `"fleet":"trial"`},
		{[]string{"--token-file", wrong, "--ca", s.ca}, exitDenied, "a token is needed"},
		{[]string{"--ca", s.ca}, exitDenied, "a token is needed"},
		{[]string{"--token-file", right, "--ca", s.strangers}, exitError, "certificate"},
	} {
		var stdout, stderr bytes.Buffer
		code := run(append([]string{"fleet", "--json", "--url", "https://127.0.0.1:" + port}, c.args...), &stdout, &stderr)
		if code != c.code || !strings.Contains(stdout.String()+stderr.String(), c.want) {
			t.Errorf("%v: %d %s%s", c.args, code, stdout.String(), stderr.String())
		}
	}
	var stdout, stderr bytes.Buffer
	if code := run([]string{"fleet", "--url", "http://192.0.2.1:1", "--token-file", right}, &stdout, &stderr); code != exitUsage || !strings.Contains(stderr.String(), "unencrypted") {
		t.Errorf("%d %s", code, stderr.String())
	}
}

// syncBuffer is what two goroutines write to and read from.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// A newcomer with the fleet's key joins, is granted what it asks for, and leaves in
// order; with another key it meets nobody.
func TestFleetRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte("# of the trial\nMDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY= # first\n\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	defer ended.Wait()
	defer cancel()
	store := "file:" + filepath.Join(t.TempDir(), "register")
	start := func(name string, seeds ...string) (out *syncBuffer, stop func()) {
		out = &syncBuffer{}
		mine, stop := context.WithCancel(ctx)
		r := fleetRun{
			name: name, fleet: "trial", roster: []string{"a", "b"}, seeds: seeds, bind: "127.0.0.1:0", http: "127.0.0.1:0",
			network: "tcp", keys: file, store: registerFlags{url: store}, key: "k", rate: 1000, burst: 100, demand: 200,
		}
		ended.Go(func() {
			if err := r.run(mine, out, io.Discard); !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", name, err)
			}
		})
		return out, stop
	}
	a, _ := start("a")
	var at string
	soon(t, "a listens", func() bool {
		m := regexp.MustCompile(`a listens on (\S+)\n`).FindStringSubmatch(a.String())
		if m != nil {
			at = m[1]
		}
		return m != nil
	})
	start("b", at)
	c, stopC := start("c", at)
	soon(t, "c has a share", func() bool { return strings.Contains(c.String(), "of 200/s, share 33.3 %, configuration 2") })
	stopC()
	soon(t, "c is gone", func() bool { return strings.Contains(c.String(), "c leaves\n") })
	soon(t, "the others have its share", func() bool { return strings.Contains(a.String(), "share 50.0 %, configuration 3") })

	for _, bad := range []string{"x", "MDEyMzQ1Njc4OWFiY2RlZg=="} {
		if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readKeys(file); err == nil || !strings.Contains(err.Error(), "--keys "+file) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	var stdout, stderr bytes.Buffer
	if code := run([]string{"fleet", "run", "--demand", "-1"}, &stdout, &stderr); code != exitUsage ||
		!strings.Contains(stderr.String(), "--demand") || !strings.Contains(stderr.String(), "--name: must be given") {
		t.Errorf("%d %s", code, stderr.String())
	}
	if code := run([]string{"fleet", "run", "--name", "a", "--rate", "0"}, &stdout, &stderr); code != exitUsage || !strings.Contains(stderr.String(), "Limit.Rate") {
		t.Errorf("%d %s", code, stderr.String())
	}
}
