// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The dependency is down while half of the requests are orders: nothing reaches
// it but probes, and every order that was taken is charged once, in order. With
// STORMGUARD_FULL=1 for 20 s, and without the race detector at 1,000 requests a
// second, where the 99th percentile of the degraded answers is asserted too,
// unless the machine is too busy for plain answers.
func TestOutage(t *testing.T) {
	p := plan{rate: 300, outage: 2 * time.Second}
	full := os.Getenv("STORMGUARD_FULL") == "1"
	if full {
		p.outage = 20 * time.Second
		if !raceEnabled {
			p.rate = 1000
		}
	}
	f, err := p.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	f.print(&out)
	t.Log(out.String())
	if err := f.check(); err != nil {
		t.Error(err)
	}
	if least := int(p.outage.Seconds()*float64(p.rate)/2*0.4) - p.rate/10; f.Accepted < least || f.Refused < least {
		t.Errorf("%d held and %d refused, want at least %d of each", f.Accepted, f.Refused, least)
	}
	switch {
	case !full || raceEnabled || f.P99 <= 5:
	case f.PlainP99 > 2.5:
		t.Logf("not judged: the 99th percentile of a plain answer is %.2f ms on this machine, now", f.PlainP99)
	case f.P99 > 5:
		t.Errorf("the 99th percentile of the degraded answers is %.2f ms, of plain ones %.2f ms", f.P99, f.PlainP99)
	}
}

// A server that does not answer is not sent more than it can be, and the load ends
// while there is patience left.
func TestLoadIsBounded(t *testing.T) {
	gate := make(chan struct{})
	var here atomic.Int64
	server, addr, err := listen(t.Context(), http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		here.Add(1)
		<-gate
	}))
	if err != nil {
		t.Fatal(err)
	}
	client := newClient()
	l := &load{}
	ctx, stop := context.WithCancel(t.Context())
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		l.send(ctx, addr, 20_000, client)
	}()
	for here.Load() < inFlight {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(time.Second) // thousands more would come
	most := here.Load()
	stop()
	close(gate)
	<-sent
	client.CloseIdleConnections()
	if err := errors.Join(l.err, server.Shutdown(t.Context())); err != nil {
		t.Error(err)
	}
	if most > inFlight || l.unsent == 0 || len(l.answers) > inFlight {
		t.Errorf("%d at once, %d unsent, %d answers", most, l.unsent, len(l.answers))
	}
	for _, outage := range []time.Duration{time.Second, 20 * time.Second, time.Hour} {
		if d := (plan{outage: outage}).loaded(); d >= patience/2 {
			t.Errorf("after an outage of %s the load goes on for %s", outage, d)
		}
	}
}

// The check can fail.
func TestFiguresCheck(t *testing.T) {
	good := figures{Calls: 5, Probes: 5, Accepted: 10, Refused: 10, Replayed: 10}
	if err := good.check(); err != nil {
		t.Error(err)
	}
	open, back := time.Unix(100, 0), time.Unix(200, 0)
	sent := time.Unix(150, 0)
	var f figures
	f.count([]answer{
		{seq: 1, status: 202, id: 1, hold: "memory", sent: sent, took: time.Millisecond},
		{seq: 2, status: 202, id: 2, hold: "memory", sent: sent, took: 2 * time.Millisecond},
		{seq: 3, status: 202, id: 3, sent: sent, took: 3 * time.Millisecond},
		{seq: 4, status: 202, id: 4, hold: "memory", sent: sent, took: 9 * time.Millisecond},
		{seq: 5, status: 200, sent: sent, took: time.Hour},
		{seq: plain, status: 200, sent: sent, took: time.Second},
		{seq: 6, status: 404, sent: sent}, {seq: 7, status: 500, sent: sent},
	}, []int{1, 5, 3, 2, 3}, open, back)
	if f.Twice != 1 || f.Missing != 1 || f.OutOfOrder != 1 || f.NoHeader != 1 || f.Other != 1 || f.Failed != 1 || f.Max != 9 || f.P50 != 3 || f.PlainP99 != 1000 || f.Requests != 7 {
		t.Errorf("%+v", f)
	}
	f.Calls = 3
	for _, want := range []string{"3 calls while", "1 were replayed twice, 1 never, 1 out of order", "do not say", "0 refused", "another kind"} {
		if err := f.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestCommand(t *testing.T) {
	for _, args := range [][]string{{"--rate", "1"}, {"--outage", "1ms"}, {"--no-such-flag"}} {
		if err := command(t.Context(), new(bytes.Buffer), args); err == nil {
			t.Errorf("%v is taken", args)
		}
	}
	var out bytes.Buffer
	if err := command(t.Context(), &out, []string{"--outage", "1s", "--rate", "100", "--json"}); err != nil {
		t.Fatal(err)
	}
	var f figures
	if err := json.Unmarshal(out.Bytes(), &f); err != nil || f.Rate != 100 || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("%v: %s", err, out.String())
	}
}
