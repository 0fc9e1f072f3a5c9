// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
)

// Target is what [Inspect] looks at. API and Queue must be set.
type Target struct {
	// API is the management plugin's address with user and password:
	// "http://user:password@host:15672". The user needs the tag "monitoring".
	API string

	// VHost is the virtual host; unset means "/".
	VHost string

	// Queue is the queue that is consumed.
	Queue string

	// DLQ is the queue that a [DLQ] writes to; unset means that dead letters
	// go elsewhere.
	DLQ string

	// Native says that the program uses [WithDeadLetterExchange], so that dead letters go to the
	// queue's dead-letter exchange.
	Native bool

	// Prefetch is [WithPrefetch]; unset means 256.
	Prefetch int

	// ConsumerTimeout is [WithConsumerTimeout]; unset means 30m.
	ConsumerTimeout time.Duration

	// Hold is the longest outage that must lose nothing. Unset means 1h; not
	// below 0.
	Hold time.Duration

	// HandlerTime is how long a handler usually takes for one message, divided by the number of
	// workers. Unset leaves out the findings that need it.
	HandlerTime time.Duration

	// Client does the requests; unset means [http.DefaultClient].
	Client *http.Client
}

// manyPrefetched is the prefetch from which a crashing consumer brings many messages nearer to
// their delivery limit.
const manyPrefetched = 100

// enoughDeliveries is the delivery limit that an inspection advises.
const enoughDeliveries = 1000

func (x *inspector) raiseLimit(q *queueInfo) string {
	return x.change(q, fmt.Sprintf("\"delivery-limit\":%d", enoughDeliveries), "delivery-limit")
}

// Inspect reads the arguments and the effective policy of a queue, and of its dead-letter queue,
// from the management API. It returns the settings that would lose messages or cut a hold short,
// worst first. It changes nothing. An error means that it could not look; [ErrQueueGone] means that
// there is no such queue.
func Inspect(ctx context.Context, in Target) ([]guard.Finding, error) {
	if in.VHost == "" {
		in.VHost = "/"
	}
	if in.Prefetch == 0 {
		in.Prefetch = defaultPrefetch
	}
	if in.ConsumerTimeout == 0 {
		in.ConsumerTimeout = defaultConsumerTimeout
	}
	if in.Hold < 0 {
		return nil, fmt.Errorf("amqp: Target.Hold: %s is below 0", in.Hold)
	}
	if in.Hold == 0 {
		in.Hold = time.Hour
	}
	if in.Client == nil {
		in.Client = http.DefaultClient
	}
	base, err := url.Parse(in.API)
	if err != nil || base.Host == "" {
		return nil, errors.New("amqp: Target.API: not of the form http://user:password@host:15672")
	}
	if in.Queue == "" {
		return nil, errors.New("amqp: Target.Queue: must not be empty")
	}
	x := &inspector{in: &in, base: base}
	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	if err := x.get(ctx, &overview, "overview"); err != nil {
		return nil, err
	}
	major, _, _ := strings.Cut(overview.Version, ".")
	x.major, _ = strconv.Atoi(major)
	q, err := x.queue(ctx, in.Queue)
	if err != nil {
		return nil, err
	}
	if err := x.source(ctx, q); err != nil {
		return nil, err
	}
	if in.DLQ != "" {
		if err := x.deadLetters(ctx); err != nil {
			return nil, err
		}
	}
	var sorted []guard.Finding
	for _, s := range []guard.Severity{guard.Danger, guard.Warning, guard.Notice} {
		for _, f := range x.found {
			if f.Severity == s {
				sorted = append(sorted, f)
			}
		}
	}
	return sorted, nil
}

// inspector collects findings.
type inspector struct {
	in    *Target
	base  *url.URL
	major int
	found []guard.Finding
}

var errNotThere = errors.New("amqp: not found")

// get reads one resource of the API.
func (x *inspector) get(ctx context.Context, into any, path ...string) error {
	parts := []string{"api"}
	for _, p := range path {
		parts = append(parts, url.PathEscape(p))
	}
	u := x.base.JoinPath(parts...)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return errors.New("amqp: inspect: the API's address cannot be used") // the error's text would have the password
	}
	resp, err := x.in.Client.Do(req)
	if err != nil {
		if inner, ok := errors.AsType[*url.Error](err); ok {
			err = inner.Err
		}
		return fmt.Errorf("amqp: inspect: %s: %w", u.Redacted(), err)
	}
	defer resp.Body.Close() //nolint:errcheck // it was read
	switch {
	case resp.StatusCode == http.StatusNotFound:
		return errNotThere
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("amqp: inspect: %s: %s", u.Redacted(), resp.Status)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(into); err != nil {
		return fmt.Errorf("amqp: inspect: %s: %w", u.Redacted(), err)
	}
	return nil
}

// queueInfo is a queue as the API describes it.
type queueInfo struct {
	Name       string
	Type       string
	Durable    bool
	AutoDelete bool `json:"auto_delete"`
	Exclusive  bool
	Arguments  map[string]any
	Policy     map[string]any `json:"effective_policy_definition"`
	Messages   int
	Persistent int      `json:"messages_persistent"`
	Members    []string // of a quorum queue or a stream
	Mirrors    []string `json:"slave_nodes"` // of a classic queue, before RabbitMQ 4
}

func (x *inspector) queue(ctx context.Context, name string) (*queueInfo, error) {
	var q queueInfo
	err := x.get(ctx, &q, "queues", x.in.VHost, name)
	if errors.Is(err, errNotThere) {
		return nil, fmt.Errorf("%w: %s in vhost %s", ErrQueueGone, name, x.in.VHost)
	}
	return &q, err
}

// policyFirst tells whether the policy overrides the queue's argument of this name.
func (q *queueInfo) policyFirst(name string) bool {
	return q.Type == amqp091.QueueTypeQuorum && name == "overflow" || q.Type == amqp091.QueueTypeStream && name == "max-age"
}

// text is a setting of the queue: its argument, or else the policy's. See policyFirst for
// exceptions.
func (q *queueInfo) text(name string) string {
	arg, ok := q.Arguments["x-"+name].(string)
	policy, is := q.Policy[name].(string)
	if !ok || is && q.policyFirst(name) {
		return policy
	}
	return arg
}

// number is a setting of the queue: the lower of its argument and the policy's.
func (q *queueInfo) number(name string) (n int, ok bool) {
	for _, v := range []any{q.Arguments["x-"+name], q.Policy[name]} {
		if f, is := v.(float64); is {
			if !ok || int(f) < n {
				n = int(f)
			}
			ok = true
		}
	}
	return n, ok
}

// deliveryLimit is the limit that applies; false if there is none. From 4.0 on, a limit below 0
// means none, and the other setting applies if there are two. Before 4.0, the first delivery
// exceeds such a limit.
func (x *inspector) deliveryLimit(q *queueInfo) (n int, ok bool) {
	if q.Type != amqp091.QueueTypeQuorum {
		return 0, false
	}
	n, ok = q.number("delivery-limit")
	switch {
	case x.major < 4:
		return max(n, 0), ok
	case !ok:
		return defaultDeliveryLimit, true
	}
	arg, both := q.Arguments["x-delivery-limit"].(float64)
	if policy, is := q.Policy["delivery-limit"].(float64); both && is && n < 0 {
		n = int(max(arg, policy))
	}
	return n, n >= 0
}

func (x *inspector) add(s guard.Severity, q *queueInfo, problem, fix string) {
	where := "queue " + strings.TrimSuffix(x.in.VHost, "/") + "/" + q.Name
	x.found = append(x.found, guard.Finding{Severity: s, Where: where, What: problem, Fix: fix})
}

// policy returns the command that sets a policy on a queue.
func (x *inspector) policy(q *queueInfo, definition string) string {
	return fmt.Sprintf("rabbitmqctl set_policy -p %s --apply-to queues --priority 10 %s '^%s$' '{%s}' (a queue has one policy: keep what yours says)",
		x.in.VHost, q.Name, q.Name, definition)
}

// change returns how to change a setting: by a policy, unless an argument sets it.
func (x *inspector) change(q *queueInfo, definition, name string) string {
	fix := x.policy(q, definition)
	if _, set := q.Arguments["x-"+name]; set && !q.policyFirst(name) {
		fix = anew(name) + ", then " + fix
	}
	return fix
}

// without returns how to remove a setting.
func (x *inspector) without(q *queueInfo, name string) string {
	var fixes []string
	if _, set := q.Arguments["x-"+name]; set {
		fixes = append(fixes, anew(name))
	}
	if _, set := q.Policy[name]; set {
		fixes = append(fixes, x.policy(q, "")+" without "+name)
	}
	return strings.Join(fixes, ", then ")
}

// anew returns how to remove an argument: a queue keeps its arguments as long as it exists.
func anew(name string) string { return "declare it anew without x-" + name }

// placement checks how many nodes keep the queue.
func (x *inspector) placement(q *queueInfo) {
	switch {
	case q.Type == amqp091.QueueTypeClassic:
		what := "it is a classic queue: one node keeps it"
		if len(q.Mirrors) > 0 {
			what = "it is a mirrored classic queue: RabbitMQ 4 has no mirrors"
		}
		if q.Name == x.in.Queue {
			what += ". It counts no deliveries, so a message that crashes its consumer does so for ever"
		}
		x.add(guard.Warning, q, what, "move to a quorum queue of another name: "+DLQConfig{Queue: "NAME", Kind: amqp091.QueueTypeQuorum}.command())
	case len(q.Members) == 1:
		add := "rabbitmq-queues add_member"
		if q.Type == amqp091.QueueTypeStream {
			add = "rabbitmq-streams add_replica"
		}
		x.add(guard.Warning, q, "it has one replica: the disk of one node is all there is",
			fmt.Sprintf("add nodes to the cluster, then: %s -p %s %s NODE", add, x.in.VHost, q.Name))
	}
}

// source checks the consumed queue.
func (x *inspector) source(ctx context.Context, q *queueInfo) error {
	switch {
	case q.Type == amqp091.QueueTypeStream:
		x.add(guard.Danger, q, "it is a stream: acks remove nothing, and a consumer begins where it is told to", "consume from a quorum queue")
		return nil
	case !q.Durable:
		x.add(guard.Danger, q, "it is not durable: it is gone with the broker's next restart", "declare it anew: rabbitmqadmin declare queue name="+q.Name+" durable=true arguments='{\"x-queue-type\":\"quorum\"}'")
	case q.Type == amqp091.QueueTypeClassic && q.Messages > q.Persistent && q.Persistent >= 0:
		x.add(guard.Warning, q, fmt.Sprintf("%d of its %d messages are transient: they are gone with the broker's next restart, and with its dead-letter queue's", q.Messages-q.Persistent, q.Messages),
			"publish with delivery mode 2")
	default:
	}
	x.placement(q)
	if q.AutoDelete || q.Exclusive {
		x.add(guard.Danger, q, "it is deleted when its last consumer goes, as it does in a long hold and when the connection breaks", "declare it anew with auto_delete and exclusive false")
	}
	if n, ok := q.number("expires"); ok {
		x.add(guard.Danger, q, fmt.Sprintf("it is deleted after %s without a consumer, which a long hold is", ms(n)), x.without(q, "expires"))
	}
	if err := x.limits(ctx, q); err != nil {
		return err
	}
	if n, ok := q.number("message-ttl"); ok && ms(n) < x.in.Hold {
		x.add(guard.Danger, q, fmt.Sprintf("its messages expire after %s, also while an outage of %s holds them", ms(n), x.in.Hold), x.without(q, "message-ttl"))
	}
	x.overflow(q)
	if n, ok := q.number("consumer-timeout"); ok && time.Duration(n)*time.Millisecond < x.in.ConsumerTimeout {
		x.add(guard.Danger, q, fmt.Sprintf("its consumer timeout is %s, and the guard counts on %s: the broker closes the channel under a hold", ms(n), x.in.ConsumerTimeout),
			fmt.Sprintf("guardamqp.WithConsumerTimeout(%d * time.Millisecond), or %s", n, x.change(q, fmt.Sprintf("\"consumer-timeout\":%d", x.in.ConsumerTimeout.Milliseconds()), "consumer-timeout")))
	}
	if whole := time.Duration(x.in.Prefetch) * x.in.HandlerTime; x.in.HandlerTime > 0 && whole > x.in.ConsumerTimeout/2 {
		x.add(guard.Warning, q, fmt.Sprintf("the last of %d prefetched messages waits %s, more than half of the consumer timeout of %s", x.in.Prefetch, whole, x.in.ConsumerTimeout),
			fmt.Sprintf("guardamqp.WithPrefetch(%d)", max(1, int(x.in.ConsumerTimeout/4/x.in.HandlerTime))))
	}
	return nil
}

// limits checks the delivery limit and the dead-letter exchange.
func (x *inspector) limits(ctx context.Context, q *queueInfo) error {
	quorum := q.Type == amqp091.QueueTypeQuorum
	limit, limited := x.deliveryLimit(q)
	if policy, set := q.Policy["delivery-limit"].(float64); set && limited && int(policy) != limit {
		x.add(guard.Warning, q, fmt.Sprintf("its delivery limit is %d, by its argument: the %d of its policy has no effect", limit, int(policy)),
			fmt.Sprintf("%s, or guardamqp.WithDeliveryLimit(%d)", anew("delivery-limit"), max(limit, 1)))
	}
	exchange := q.text("dead-letter-exchange")
	_, has := q.Arguments["x-dead-letter-exchange"]
	_, byPolicy := q.Policy["dead-letter-exchange"]
	has = has || byPolicy
	toDLX := "\"dead-letter-exchange\":\"NAME\",\"dead-letter-strategy\":\"at-least-once\",\"overflow\":\"reject-publish\""
	switch {
	case !has && x.in.Native:
		x.add(guard.Danger, q, "it has no dead-letter exchange: what is rejected is dropped", x.policy(q, toDLX))
	case !has && limited:
		fix := x.policy(q, toDLX)
		if x.major >= 4 {
			fix += ", or " + x.change(q, "\"delivery-limit\":-1", "delivery-limit") + " and guardamqp.WithDeliveryLimit(1000000)"
		}
		x.add(guard.Danger, q, fmt.Sprintf("its delivery limit is %d and it has no dead-letter exchange: after %d deliveries, broken connections among them, the broker drops a message", limit, limit+1), fix)
	case has:
		if err := x.exchange(ctx, q, exchange); err != nil {
			return err
		}
		x.strategy(q, quorum, toDLX)
	case x.in.DLQ == "":
		x.add(guard.Warning, q, "it has no dead-letter exchange, and no queue of dead letters is named: a message that keeps failing has nowhere to go and stops the queue",
			"guardamqp.NewDLQ and guardamqp.WithDeadLetters in the program, and its queue here: Target.DLQ, or --dlq")
	default:
	}
	if limited && limit < enoughDeliveries && x.in.Prefetch >= manyPrefetched {
		x.add(guard.Warning, q, fmt.Sprintf("a consumer that crashes %d times brings all %d prefetched messages to its delivery limit, although no handler saw them", limit+1, x.in.Prefetch),
			fmt.Sprintf("a smaller prefetch, such as guardamqp.WithPrefetch(%d), or a higher limit: %s", manyPrefetched/5, x.raiseLimit(q)+fmt.Sprintf(", and guardamqp.WithDeliveryLimit(%d)", enoughDeliveries)))
	}
	return nil
}

// exchange checks whether dead letters reach a queue.
func (x *inspector) exchange(ctx context.Context, q *queueInfo, name string) error {
	if name == "" {
		return nil // the default exchange routes to queues by name
	}
	var bindings []struct{ Destination string }
	err := x.get(ctx, new(struct{}), "exchanges", x.in.VHost, name)
	if err == nil {
		err = x.get(ctx, &bindings, "exchanges", x.in.VHost, name, "bindings", "source")
	}
	switch {
	case errors.Is(err, errNotThere):
		x.add(guard.Danger, q, fmt.Sprintf("its dead-letter exchange %q does not exist: dead letters are dropped", name), "rabbitmqadmin declare exchange name="+name+" type=fanout durable=true")
	case err != nil:
		return err
	case len(bindings) == 0:
		x.add(guard.Danger, q, fmt.Sprintf("nothing is bound to its dead-letter exchange %q: dead letters are dropped", name), "rabbitmqadmin declare binding source="+name+" destination=QUEUE")
	}
	return nil
}

// strategy checks whether the broker can lose dead letters on their way.
func (x *inspector) strategy(q *queueInfo, quorum bool, toDLX string) {
	switch {
	case !quorum:
		x.add(guard.Warning, q, "the broker's dead-lettering from a classic queue is at most once: a letter can be lost on its way", "a quorum queue, or guardamqp.WithDeadLetters instead")
	case q.text("dead-letter-strategy") != "at-least-once":
		x.add(guard.Warning, q, "the broker's dead-lettering is at most once: a letter can be lost on its way", x.change(q, toDLX, "dead-letter-strategy"))
	case q.text("overflow") != "reject-publish":
		x.add(guard.Danger, q, "at-least-once dead-lettering without reject-publish is silently at most once", x.policy(q, toDLX))
	default:
	}
}

// overflow checks whether a full queue drops messages.
func (x *inspector) overflow(q *queueInfo) {
	_, count := q.number("max-length")
	_, bytes := q.number("max-length-bytes")
	o := q.text("overflow")
	drops := o == "" || o == "drop-head" || o != "reject-publish" && q.Type == amqp091.QueueTypeQuorum // a quorum queue knows no other values
	if (count || bytes) && drops {
		x.add(guard.Danger, q, "it has a maximum length and drops its oldest messages when it is full", x.change(q, "\"overflow\":\"reject-publish\"", "overflow"))
	}
}

// deadLetters checks the queue of a [DLQ].
func (x *inspector) deadLetters(ctx context.Context) error {
	q, err := x.queue(ctx, x.in.DLQ)
	if errors.Is(err, ErrQueueGone) {
		missing := &queueInfo{Name: x.in.DLQ}
		x.add(guard.Warning, missing, "it does not exist: dead letters wait", DLQConfig{Queue: x.in.DLQ, Kind: amqp091.QueueTypeQuorum}.command())
		return nil
	}
	if err != nil {
		return err
	}
	x.placement(q)
	if !q.Durable || q.AutoDelete || q.Exclusive {
		x.add(guard.Danger, q, "it is not durable, or deleted with its last consumer: dead letters are lost with it", "delete it, and "+DLQConfig{Queue: x.in.DLQ, Kind: amqp091.QueueTypeQuorum}.command())
	}
	for _, name := range []string{"expires", "message-ttl", "max-age"} {
		if n, ok := q.number(name); ok {
			x.add(guard.Warning, q, fmt.Sprintf("dead letters in it end after %s (%s)", ms(n), name), x.without(q, name))
		}
	}
	if age := q.text("max-age"); age != "" {
		x.add(guard.Notice, q, "dead letters in it end after "+age+" (max-age)", x.change(q, "\"max-age\":\"LONGER\"", "max-age"))
	}
	if q.Type != amqp091.QueueTypeStream {
		x.overflow(q)
	}
	if limit, limited := x.deliveryLimit(q); limited && limit < enoughDeliveries && q.text("dead-letter-exchange") == "" {
		x.add(guard.Notice, q, "a consumer of dead letters that crashes over and over makes the broker drop them at the delivery limit", x.raiseLimit(q))
	}
	return nil
}

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }
