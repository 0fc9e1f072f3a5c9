// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// asCLI, if set, makes the tests' program the CLI.
const asCLI = "STORMGUARD_TEST_AS_CLI"

func TestMain(m *testing.M) {
	if os.Getenv(asCLI) != "" {
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
	}
	if err := os.Setenv("STORMGUARD_LANG", "en"); err != nil { // whatever the person's is
		panic(err)
	}
	goleak.VerifyTestMain(m,
		// nats-server, sarama's metrics and os/signal each keep one goroutine for
		// the process.
		goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.init.0.func1"),
		// A probe that is under way when a node closes sends nothing, and ends within 2 s.
		goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"),
		goleak.IgnoreTopFunction("os/signal.signal_recv"),
		goleak.IgnoreTopFunction("os/signal.loop"))
}

func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args   string
		code   int
		stdout string // a pattern
		stderr string // exact; - is not looked at
	}{
		{"version", exitOK, `^stormguard \S.* go\d\S* \w+/\w+\n$`, ""},
		{"", exitOK, `Available Commands:`, ""},
		{"completion bash", exitOK, `bash completion`, ""},
		{"demo --help", exitOK, `contain_seconds +from the start of the outage`, ""},
		{"storm", exitUsage, `^$`, "stormguard: unknown command \"storm\" for \"stormguard\"\nSee \"stormguard --help\".\n"},
		{"demo now", exitUsage, `^$`, "stormguard: unknown command \"now\" for \"stormguard demo\"\nSee \"stormguard demo --help\".\n"},
		{"demo --fast", exitUsage, `^$`, "stormguard: unknown flag: --fast\nSee \"stormguard demo --help\".\n"},
		{
			"demo --rate 5 --outage soon --warmup 1h --after 10ms --creds x", exitUsage, `^$`,
			`stormguard: --rate "5": must be a number from 10 to 20000
--outage "soon": must be a duration from 1s to 5m0s
--warmup "1h": must be a duration from 500ms to 1m0s
--after "10ms": must be a duration from 500ms to 1m0s
--creds "x": needs --broker nats and --url, nothing else asks for a file
See "stormguard demo --help".
`,
		},
		{
			"demo --broker mqtt --rate 1", exitUsage, `^$`,
			`stormguard: --broker "mqtt": must be kafka, nats or rabbitmq
--rate "1": must be a number from 10 to 20000
See "stormguard demo --help".
`,
		},
		{
			"demo --broker kafka --url nats://me:secret@host:4222 --creds x", exitUsage, `^$`,
			`stormguard: --url "nats://...@host:4222": must be host:port,host:port,... for --broker kafka
--creds "x": needs --broker nats and --url, nothing else asks for a file
See "stormguard demo --help".
`,
		},
		{
			"demo --broker rabbitmq --url localhost:5672", exitUsage, `^$`,
			`stormguard: --url "localhost:5672": must be amqp://user:password@host:port/ (or amqps) for --broker rabbitmq
See "stormguard demo --help".
`,
		},
		{
			"demo --tls --user bob --errors odd", exitUsage, `^$`,
			`stormguard: --errors "odd": must be refused or unknown
--tls, --ca, --cert, --user, --sasl: need --url, the demo's own brokers want none of them
--user and --password-file: must be given together
See "stormguard demo --help".
`,
		},
		{
			"demo --broker rabbitmq --url amqp://localhost --ca ca.pem --sasl plain", exitUsage, `^$`,
			`stormguard: --tls, --ca, --cert: need amqps:// in --url
--sasl "plain": is for Kafka
See "stormguard demo --help".
`,
		},
		{
			"demo --broker kafka --url localhost:9093 --ca no/such/file", exitUsage, `^$`,
			"stormguard: --ca: open no/such/file: no such file or directory\nSee \"stormguard demo --help\".\n",
		},
		{
			"demo --url amqp://localhost", exitUsage, `^$`,
			`stormguard: --url "amqp://localhost": must be nats://host:port (or tls, ws, wss) for --broker nats
See "stormguard demo --help".
`,
		},
		{"simulate --only ^reset$ --seed 7 --json", exitOK, `^\{"seed":7,"seeds":\[7\],"virtual_seconds":16,"scenarios":\[\{"name":"reset",.*"worst_seed":7`, "-"},
		{"simulate --only ^reset$", exitOK, `^5 seeds, drawn from --seed \d+: \d+ \d+ \d+ \d+ \d+; 80 virtual seconds\n`, "-"},
		{"simulate --only ^reset$ --seed 1 --seeds 2", exitOK, `^2 seeds, drawn from --seed 1: `, "-"},
		{"simulate --only ^skew-3$ --strategy static --seeds 2", exitError, `FAILED with 2 of 2 seeds`, "-"},
		{
			"simulate --seeds 0 --seed -1", exitUsage, `^$`,
			`stormguard: --seed "-1": must be a number from 0 to 2147483647
--seeds "0": must be a number from 1 to 100000
See "stormguard simulate --help".
`,
		},
		{
			"simulate --only nosuch", exitUsage, `^$`,
			"stormguard: simulate: no scenario's name matches \"nosuch\"\nSee \"stormguard simulate --help\".\n",
		},
		{"simulate liveness --only ^adjacent-1-unknown-none$ --json", exitOK, `^\{"rows":\[\{"name":"adjacent-1-unknown-none",`, "-"},
		{
			"simulate liveness --seed 1 --seeds 2", exitUsage, `^$`,
			"stormguard: --seeds: draws seeds, and --seed names one; give one of them\nSee \"stormguard simulate liveness --help\".\n",
		},
		{
			"simulate liveness --only nosuch", exitUsage, `^$`,
			"stormguard: simulate liveness: no row's name matches \"nosuch\"\nSee \"stormguard simulate liveness --help\".\n",
		},
	} {
		t.Run(c.args, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if code := run(strings.Fields(c.args), &stdout, &stderr); code != c.code {
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			if !regexp.MustCompile(c.stdout).MatchString(stdout.String()) {
				t.Errorf("stdout %q does not match %s", stdout.String(), c.stdout)
			}
			if c.stderr != "-" && stderr.String() != c.stderr {
				t.Errorf("stderr:\n%s\nwant:\n%s", stderr.String(), c.stderr)
			}
		})
	}
}

func TestInterrupt(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	self, err := os.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(time.Second, func() { _ = self.Signal(os.Interrupt) })
	defer timer.Stop()
	var stdout, stderr bytes.Buffer
	if code := run([]string{"demo", "--json"}, &stdout, &stderr); code != exitInterrupted || stdout.Len() > 0 {
		t.Errorf("exit code %d, stdout %q", code, stdout.String())
	}
	if !strings.HasSuffix(stderr.String(), "stormguard: interrupted\n") {
		t.Errorf("stderr %q", stderr.String())
	}
	if rest, _ := os.ReadDir(dir); len(rest) > 0 {
		t.Errorf("left behind: %v", rest)
	}
}

func TestFailure(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := run([]string{"demo", "--url", "nats://127.0.0.1:1"}, &stdout, &stderr); code != exitError {
		t.Errorf("exit code %d", code)
	}
	if !strings.Contains(stderr.String(), "nats://127.0.0.1:1") || strings.Contains(stderr.String(), "--help") {
		t.Errorf("stderr %q", stderr.String())
	}
}
