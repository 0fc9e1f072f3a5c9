// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package amqp

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

func TestInspect(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		four := s.kind == brokers.RabbitMQ4
		for name, c := range map[string]struct {
			kind   Kind
			args   amqp091.Table
			policy string
			in     Target
			want   []string // "severity: a part of the problem"
		}{
			"good": {Quorum, amqp091.Table{
				"x-delivery-limit": int64(50), "x-dead-letter-exchange": "amq.fanout.of.ours", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
			}, "", Target{Prefetch: 10}, []string{"danger: does not exist"}},
			"default exchange": {Quorum, amqp091.Table{
				"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
			}, "", Target{Prefetch: 10}, nil},
			"limit without a place":  {Quorum, amqp091.Table{"x-delivery-limit": int64(5)}, "", Target{Prefetch: 10}, []string{"danger: after 6 deliveries"}},
			"limit by policy":        {Quorum, nil, `"delivery-limit":7`, Target{Prefetch: 10}, []string{"danger: after 8 deliveries"}},
			"the lower limit counts": {Quorum, amqp091.Table{"x-delivery-limit": int64(9)}, `"delivery-limit":7`, Target{Prefetch: 10}, []string{"danger: after 8 deliveries"}},
			"at most once":           {Quorum, amqp091.Table{"x-dead-letter-exchange": "amq.direct"}, "", Target{Prefetch: 10}, []string{"danger: nothing is bound", "warning: at most once"}},
			"silently at most once": {Quorum, amqp091.Table{"x-dead-letter-exchange": "", "x-dead-letter-strategy": "at-least-once"}, "", Target{Prefetch: 10},
				[]string{"danger: without reject-publish"}},
			"a storm of its own": {Quorum, amqp091.Table{"x-delivery-limit": int64(20), "x-dead-letter-exchange": ""}, "", Target{Prefetch: 1000},
				[]string{"warning: at most once", "warning: crashes 21 times brings all 1000"}},
			"native without a place": {Classic, nil, "", Target{Native: true}, []string{"danger: what is rejected is dropped"}},
			"classic":                {Classic, amqp091.Table{"x-dead-letter-exchange": ""}, "", Target{}, []string{"warning: from a classic queue"}},
			"ends by itself": {Classic, amqp091.Table{"x-expires": int64(60000), "x-message-ttl": int64(1000)}, "", Target{},
				[]string{"danger: deleted after 1m0s", "danger: expire after 1s"}},
			"drops its head": {Classic, amqp091.Table{"x-max-length": int64(10)}, "", Target{}, []string{"danger: drops its oldest"}},
			"short timeout": {Classic, amqp091.Table{"x-consumer-timeout": int64(60000)}, "", Target{},
				[]string{"danger: its consumer timeout is 1m0s, and the guard counts on 30m0s"}},
			"slow":   {Classic, nil, "", Target{HandlerTime: 10 * time.Second}, []string{"warning: waits 42m40s"}},
			"stream": {Stream, nil, "", Target{}, []string{"danger: it is a stream"}},
			"no dlq": {Classic, nil, "", Target{DLQ: "no-such-queue"}, []string{"warning: it does not exist: dead letters wait"}},
		} {
			t.Run(name, func(t *testing.T) {
				if name == "short timeout" && !four {
					delete(c.args, "x-consumer-timeout") // 3.10 refuses it as an argument
					c.want = nil
				}
				r := newRig(t, s, c.kind, c.args)
				if c.policy != "" {
					r.policy(t, c.policy)
				}
				in := c.in
				in.API, in.Queue = r.api, r.queue
				var wrong error
				ok := func() bool { // the API learns of queues and policies by and by
					var got []guard.Finding
					if got, wrong = Inspect(adaptertest.Context(t), in); wrong == nil {
						wrong = compare(got, c.want)
					}
					return wrong == nil
				}
				for deadline := time.Now().Add(20 * time.Second); !ok() && time.Now().Before(deadline); {
					time.Sleep(50 * time.Millisecond)
				}
				if wrong != nil {
					t.Error(wrong)
				}
			})
		}
	})
}

// compare wants findings in this order.
func compare(got []guard.Finding, want []string) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d findings: %v, want %q", len(got), got, want)
	}
	for i, w := range want {
		severity, text, _ := strings.Cut(w, ": ")
		if f := got[i]; f.Severity.String() != severity || !strings.Contains(f.What, text) || f.Fix == "" || !strings.HasPrefix(f.Where, "queue /") {
			return fmt.Errorf("%s, want %s", f, w)
		}
	}
	return nil
}

// policy applies a policy to the queue.
func (r *rig) policy(t *testing.T, definition string) {
	t.Helper()
	for _, method := range []string{http.MethodPut, http.MethodDelete} {
		do := func() {
			u, err := url.Parse(r.api)
			if err != nil {
				t.Fatal(err)
			}
			body := bytes.NewBufferString(`{"pattern":"^` + r.queue + `$","apply-to":"queues","definition":{` + definition + `}}`)
			req, err := http.NewRequest(method, u.JoinPath("api", "policies", "%2F", r.queue).String(), body)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			if _ = resp.Body.Close(); resp.StatusCode >= 300 {
				t.Fatal(resp.Status)
			}
		}
		if method == http.MethodPut {
			do()
		} else {
			t.Cleanup(do)
		}
	}
}

func TestInspectCannotLook(t *testing.T) {
	t.Parallel()
	s := shared(t, brokers.RabbitMQ)
	ctx := adaptertest.Context(t)
	for _, in := range []Target{{}, {API: "http://u:secret@", Queue: "q"}, {API: s.api}, {API: "http://u:secret@127.0.0.1:1", Queue: "q"}} {
		if _, err := Inspect(ctx, in); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%v", err)
		}
	}
	if _, err := Inspect(ctx, Target{API: s.api, Queue: "no-such-queue"}); !errors.Is(err, ErrQueueGone) {
		t.Errorf("%v", err)
	}
	wrong := strings.Replace(s.api, "guest:guest", "guest:wrong", 1)
	if _, err := Inspect(ctx, Target{API: wrong, Queue: "q"}); err == nil || !strings.Contains(err.Error(), "401") || strings.Contains(err.Error(), "wrong") {
		t.Errorf("%v (%s)", err, s.api)
	}
}
