// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
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
			"the argument is lower": {Quorum, amqp091.Table{"x-delivery-limit": int64(20)}, `"delivery-limit":-1`, Target{Prefetch: 10},
				[]string{"danger: after 21 deliveries", "warning: of its policy has no effect"}},
			"a policy drops the head": {Quorum, amqp091.Table{
				"x-dead-letter-exchange": "", "x-dead-letter-strategy": "at-least-once", "x-max-length": int64(10), "x-overflow": "reject-publish",
			}, `"overflow":"drop-head"`, Target{Prefetch: 10}, []string{"danger: without reject-publish", "danger: drops its oldest"}},
			"a policy rejects": {Quorum, amqp091.Table{
				"x-dead-letter-exchange": "", "x-dead-letter-strategy": "at-least-once", "x-max-length": int64(10), "x-overflow": "drop-head",
			}, `"overflow":"reject-publish"`, Target{Prefetch: 10}, nil},
			"a classic queue's policy does not": {Classic, amqp091.Table{"x-max-length": int64(10), "x-overflow": "drop-head"}, `"overflow":"reject-publish"`, Target{},
				[]string{"danger: drops its oldest"}},
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
				if name == "the argument is lower" && !four {
					c.policy = `"delivery-limit":50` // 3.10 refuses -1
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
						wrong = compare(slices.DeleteFunc(got, placed), c.want)
					}
					return wrong == nil
				}
				for deadline := time.Now().Add(time.Minute); !ok() && time.Now().Before(deadline); {
					time.Sleep(50 * time.Millisecond)
				}
				if wrong != nil {
					t.Error(wrong)
				}
			})
		}
	})
}

// placed tells whether a finding is of a cluster of one node, or of a queue that is
// declared without a place for dead letters: most queues of these tests are both.
func placed(f guard.Finding) bool {
	return strings.HasPrefix(f.What, "it is a classic queue") || strings.HasPrefix(f.What, "it has one replica") ||
		strings.HasPrefix(f.What, "it has no dead-letter exchange, and no queue of dead letters")
}

// How many nodes keep a queue and its dead letters, and whether these have a place.
func TestInspectPlacement(t *testing.T) {
	t.Parallel()
	s := shared(t, brokers.RabbitMQ)
	source, letters := newRig(t, s, Classic, nil), newRig(t, s, Quorum, amqp091.Table{"x-dead-letter-exchange": ""})
	const classic = "warning: it is a classic queue: one node keeps it. It counts no deliveries"
	for dlq, want := range map[string][]string{
		"":            {classic, "warning: it has no dead-letter exchange, and no queue of dead letters is named"},
		letters.queue: {classic, "warning: it has one replica"},
	} {
		var wrong error
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
			var got []guard.Finding
			if got, wrong = Inspect(adaptertest.Context(t), Target{API: source.api, Queue: source.queue, DLQ: dlq}); wrong == nil {
				wrong = compare(got, want)
			}
			if wrong == nil {
				break
			}
		}
		if wrong != nil {
			t.Error(wrong)
		}
	}
}

// Replicas by what the API answers of queues that one node cannot have.
func TestPlacement(t *testing.T) {
	for _, c := range []struct {
		q         queueInfo
		what, fix string // empty: nothing found
	}{
		{queueInfo{Name: "q", Type: "quorum", Members: []string{"a", "b", "c"}}, "", ""},
		{queueInfo{Name: "q", Type: "quorum", Members: []string{"a"}}, "it has one replica", "rabbitmq-queues add_member -p v q"},
		{queueInfo{Name: "s", Type: "stream", Members: []string{"a"}}, "it has one replica", "rabbitmq-streams add_replica -p v s"},
		{queueInfo{Name: "q", Type: "classic", Mirrors: []string{"b"}}, "it is a mirrored classic queue", "quorum"},
		{queueInfo{Name: "d", Type: "classic"}, "it is a classic queue: one node keeps it", "quorum"},
	} {
		x := &inspector{in: &Target{VHost: "v", Queue: "q"}}
		x.placement(&c.q)
		if c.what == "" && len(x.found) > 0 || c.what != "" && (len(x.found) != 1 || !strings.HasPrefix(x.found[0].What, c.what) ||
			!strings.Contains(x.found[0].Fix, c.fix) || x.found[0].Where != "queue v/"+c.q.Name) {
			t.Errorf("%+v: %v", c.q, x.found)
		}
		if c.q.Name != "q" && len(x.found) > 0 && strings.Contains(x.found[0].What, "crashes") {
			t.Errorf("of a queue of dead letters: %s", x.found[0].What)
		}
	}
}

// Argument and policy as the broker merges them, by rabbit_quorum_queue, rabbit_amqqueue_process
// and rabbit_stream_queue of 3.10 and 4.0. A fix by policy alone changes no argument.
func TestArgumentAndPolicy(t *testing.T) {
	const anew = "declare it anew without x-"
	type table = map[string]any
	for name, c := range map[string]struct {
		major        int
		kind         Kind
		args, policy table
		want         []string // parts of the problems
		fix          string   // how the last one's begins
	}{
		"no limit":       {4, Quorum, nil, table{"delivery-limit": -1.0}, nil, ""},
		"twice no limit": {4, Quorum, table{"x-delivery-limit": -1.0}, table{"delivery-limit": -1.0}, nil, ""},
		"no limit of the policy's": {4, Quorum, table{"x-delivery-limit": 20.0}, table{"delivery-limit": -1.0},
			[]string{"its delivery limit is 20, by its argument: the -1 of its policy", "its delivery limit is 20 and", "crashes 21 times"}, "a smaller prefetch, such as guardamqp.WithPrefetch(20), or a higher limit: " + anew + "delivery-limit, then rabbitmqctl"},
		"no limit of the argument's": {4, Quorum, table{"x-delivery-limit": -1.0}, table{"delivery-limit": 30.0},
			[]string{"its delivery limit is 30 and", "crashes 31 times"}, "a smaller prefetch"},
		"a negative argument of 3.10": {3, Quorum, table{"x-delivery-limit": -1.0}, nil, []string{"its delivery limit is 0 and", "crashes 1 times"}, "a smaller prefetch"},
		"the policy's limit is lower": {4, Quorum, table{"x-delivery-limit": 20.0}, table{"delivery-limit": 7.0}, []string{"its delivery limit is 7 and", "crashes 8 times"}, "a smaller prefetch"},
		"the default":                 {4, Quorum, nil, nil, []string{"its delivery limit is 20 and", "crashes 21 times"}, "a smaller prefetch, such as guardamqp.WithPrefetch(20), or a higher limit: rabbitmqctl"},
		"as high as advised":          {4, Quorum, table{"x-delivery-limit": 1000.0}, nil, []string{"its delivery limit is 1000 and"}, ""},
		"none before 4.0":             {3, Quorum, nil, nil, nil, ""},

		"overflow by policy":          {3, Quorum, table{"x-max-length": 9.0, "x-overflow": "reject-publish"}, table{"overflow": "drop-head"}, []string{"drops its oldest"}, "rabbitmqctl"},
		"not by argument":             {3, Quorum, table{"x-max-length": 9.0, "x-overflow": "drop-head"}, table{"overflow": "reject-publish"}, nil, ""},
		"what no quorum queue does":   {3, Quorum, table{"x-max-length": 9.0}, table{"overflow": "reject-publish-dlx"}, []string{"drops its oldest"}, "rabbitmqctl"},
		"what a classic one does":     {3, Classic, table{"x-max-length": 9.0}, table{"overflow": "reject-publish-dlx"}, nil, ""},
		"a classic one's by argument": {3, Classic, table{"x-max-length": 9.0, "x-overflow": "drop-head"}, table{"overflow": "reject-publish"}, []string{"drops its oldest"}, anew + "overflow, then rabbitmqctl"},
		"strategy by argument":        {3, Quorum, table{"x-dead-letter-exchange": "", "x-dead-letter-strategy": "at-most-once"}, table{"dead-letter-strategy": "at-least-once", "overflow": "reject-publish"}, []string{"at most once"}, anew + "dead-letter-strategy, then rabbitmqctl"},
		"expires by argument":         {3, Classic, table{"x-expires": 9000.0}, nil, []string{"deleted after 9s"}, anew + "expires"},
		"expires by both":             {3, Classic, table{"x-expires": 9000.0}, table{"expires": 8000.0}, []string{"deleted after 8s"}, anew + "expires, then rabbitmqctl"},
		"expires by policy":           {3, Classic, nil, table{"expires": 8000.0}, []string{"deleted after 8s"}, "rabbitmqctl"},
	} {
		q := &queueInfo{Name: "d", Type: c.kind, Durable: true, Arguments: c.args, Policy: c.policy, Members: []string{"a", "b", "c"}}
		x := &inspector{in: &Target{VHost: "v", Queue: "q", DLQ: "d", Prefetch: 256, ConsumerTimeout: time.Hour}, major: c.major}
		if err := x.source(t.Context(), q); err != nil {
			t.Fatal(err)
		}
		found := slices.DeleteFunc(x.found, placed)
		if len(found) != len(c.want) {
			t.Errorf("%s: %v", name, found)
			continue
		}
		for i, want := range c.want {
			if !strings.Contains(found[i].What, want) || i == len(c.want)-1 && !strings.HasPrefix(found[i].Fix, c.fix) {
				t.Errorf("%s: %s", name, found[i])
			}
		}
	}
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
