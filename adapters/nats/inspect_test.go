// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// Each setting that works against a guarded consumer is found, alone.
func TestInspect(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	for name, c := range map[string]struct {
		stream   jetstream.StreamConfig
		consumer jetstream.ConsumerConfig
		dead     jetstream.StreamConfig
		policy   guard.Policy
		severity guard.Severity
		want     string // in the finding; empty means none
	}{
		"sound":                   {},
		"age":                     {stream: jetstream.StreamConfig{MaxAge: 59 * time.Minute, Duplicates: time.Minute}, severity: guard.Danger, want: "MaxAge is 59m0s"},
		"age enough":              {stream: jetstream.StreamConfig{MaxAge: time.Hour}, dead: jetstream.StreamConfig{MaxAge: time.Hour}},
		"size":                    {stream: jetstream.StreamConfig{MaxMsgs: 10}, severity: guard.Danger, want: "MaxMsgs 10"},
		"size refused":            {stream: jetstream.StreamConfig{MaxMsgs: 10, Discard: jetstream.DiscardNew}},
		"subject":                 {stream: jetstream.StreamConfig{MaxMsgsPerSubject: 10, Discard: jetstream.DiscardNew}, severity: guard.Danger, want: "at MaxMsgsPerSubject 10: those that wait first; nats stream edit SRC-subject --max-msgs-per-subject=-1"},
		"subject and size":        {stream: jetstream.StreamConfig{MaxMsgsPerSubject: 10, MaxMsgs: 9}, severity: guard.Danger, want: "at MaxMsgs 9, MaxBytes -1, MaxMsgsPerSubject 10: those that wait first; nats stream edit SRC-subject-and-size --discard=new --max-msgs-per-subject=-1"},
		"subject refused":         {stream: jetstream.StreamConfig{MaxMsgsPerSubject: 10, Discard: jetstream.DiscardNew, DiscardNewPerSubject: true}},
		"memory":                  {stream: jetstream.StreamConfig{Storage: jetstream.MemoryStorage}, severity: guard.Danger, want: "in memory"},
		"ack all":                 {consumer: jetstream.ConsumerConfig{AckPolicy: jetstream.AckAllPolicy}, severity: guard.Danger, want: "AckAll"},
		"short wait":              {consumer: jetstream.ConsumerConfig{AckWait: 900 * time.Millisecond}, severity: guard.Warning, want: "900ms"},
		"long handler":            {consumer: jetstream.ConsumerConfig{AckWait: 20 * time.Second}, severity: guard.Warning, want: "AckWait (or the shortest BackOff) is 20s, and a message may be handled for 30s"},
		"as long":                 {consumer: jetstream.ConsumerConfig{AckWait: 20 * time.Second}, policy: guard.Policy{Timeout: 20 * time.Second}},
		"pending":                 {consumer: jetstream.ConsumerConfig{MaxAckPending: 9}, policy: guard.Policy{Window: 10}, severity: guard.Warning, want: "Policy.Window 10"},
		"pending default":         {consumer: jetstream.ConsumerConfig{MaxAckPending: 9}},
		"inactive":                {consumer: jetstream.ConsumerConfig{InactiveThreshold: time.Minute}, severity: guard.Warning, want: "begins at the start"},
		"inactive, new":           {consumer: jetstream.ConsumerConfig{InactiveThreshold: time.Minute, DeliverPolicy: jetstream.DeliverNewPolicy}, severity: guard.Danger, want: "passes"},
		"consumer in memory":      {consumer: jetstream.ConsumerConfig{MemoryStorage: true}, severity: guard.Warning, want: "begins at the start"},
		"consumer in memory, new": {consumer: jetstream.ConsumerConfig{MemoryStorage: true, DeliverPolicy: jetstream.DeliverNewPolicy}, severity: guard.Danger, want: "deletes it with its position, and a new one passes"},
		"deliver":                 {consumer: jetstream.ConsumerConfig{MaxDeliver: 5}, severity: guard.Danger, want: "nobody is told"},
		"dead in memory":          {dead: jetstream.StreamConfig{Storage: jetstream.MemoryStorage}, severity: guard.Danger, want: "loses the dead letters"},
		"dead age":                {dead: jetstream.StreamConfig{MaxAge: time.Hour}, severity: guard.Warning, want: "less than the source keeps"},
		"dead subject":            {dead: jetstream.StreamConfig{MaxMsgsPerSubject: 10, Discard: jetstream.DiscardNew}, severity: guard.Danger, want: "at MaxMsgsPerSubject 10; nats stream edit DEAD-dead-subject --max-msgs-per-subject=-1"},
		"dead size":               {dead: jetstream.StreamConfig{MaxBytes: 1 << 20}, severity: guard.Danger, want: "discards old dead letters"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := adaptertest.Context(t)
			id := strings.NewReplacer(" ", "-", ",", "").Replace(name)
			c.stream.Name, c.stream.Subjects = "SRC-"+id, []string{"src-" + id}
			c.dead.Name, c.dead.Subjects = "DEAD-"+id, []string{"dead-" + id}
			c.consumer.Durable = "C"
			s, err := r.js.CreateStream(ctx, c.stream)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.js.CreateStream(ctx, c.dead); err != nil {
				t.Fatal(err)
			}
			if _, err := s.CreateConsumer(ctx, c.consumer); err != nil {
				t.Fatal(err)
			}
			found, err := Inspect(ctx, r.js, Target{Stream: c.stream.Name, Consumer: "C", DLQ: c.dead.Name, Policy: c.policy})
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case c.want == "" && len(found) > 0:
				t.Errorf("found %v", found)
			case c.want == "":
			case len(found) != 1 || found[0].Severity != c.severity || !strings.Contains(found[0].String(), c.want) || found[0].Fix == "":
				t.Errorf("found %v, want one %s with %q", found, c.severity, c.want)
			}
		})
	}
}

// A restart of one server leaves a consumer in memory on the others.
func TestInspectReplicasInMemory(t *testing.T) {
	for _, replicas := range [][2]int{{3, 0}, {1, 3}} {
		var i inspection
		c := jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Minute, MemoryStorage: true, Replicas: replicas[1]}
		if i.consumer(c, replicas[0]); len(i.findings) > 0 {
			t.Errorf("%d: %v", replicas, i.findings)
		}
	}
}

// A stream that keeps the advisories is what makes a delivery limit sound.
func TestInspectFindsTheMover(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{MaxDeliver: 5})
	ctx := adaptertest.Context(t)
	letters, err := NewDLQ(ctx, r.js, DLQConfig{Stream: "DLQ"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewMover(ctx, r.js, MoverConfig{Stream: "S", Consumer: "C", DLQ: letters}); err != nil {
		t.Fatal(err)
	}
	if found, err := Inspect(ctx, r.js, Target{Stream: "S", Consumer: "C", DLQ: "DLQ"}); err != nil || len(found) > 0 {
		t.Errorf("%v, %v", found, err)
	}
}

func TestInspectSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	ctx := adaptertest.Context(t)
	for want, target := range map[string]Target{
		"Target.Stream":    {Consumer: "C", Hold: time.Second},
		"Target.Consumer":  {Stream: "S"},
		"Target.Hold: -1s": {Stream: "S", Consumer: "C", Hold: -time.Second},
		"HandlerTime: -1s": {Stream: "S", Consumer: "C", HandlerTime: -time.Second},
		"Policy.Window":    {Stream: "S", Consumer: "C", Policy: guard.Policy{Window: -1}},
		"stream X":         {Stream: "X", Consumer: "C"},
		"consumer X":       {Stream: "S", Consumer: "X"},
	} {
		if found, err := Inspect(ctx, r.js, target); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", want, found, err)
		}
	}
	found, err := Inspect(ctx, r.js, Target{Stream: "S", Consumer: "C", DLQ: "D", HandlerTime: time.Second})
	if err != nil || len(found) != 1 || found[0].Severity != guard.Warning || found[0].Where != "stream D" || !strings.HasPrefix(found[0].Fix, "nats stream add D ") {
		t.Errorf("%v, %v", found, err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Inspect(ended, r.js, Target{Stream: "S", Consumer: "C"}); err == nil {
		t.Error("looked although the context had ended")
	}
}
