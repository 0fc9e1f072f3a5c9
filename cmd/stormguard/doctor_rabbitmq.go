// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/guard"
)

func newDoctorRabbitMQ() *cobra.Command {
	var e examination
	target := amqp.Target{Prefetch: 256, ConsumerTimeout: 30 * time.Minute}
	cmd := &cobra.Command{
		Use:   "rabbitmq",
		Short: "Look at a queue and its dead-letter queue",
		Long: `Look at a queue and its dead-letter queue: type, replicas, arguments and effective
policy. A queue that does not exist is a finding.

--url is the HTTP address of RabbitMQ's management plugin, not an amqp:// one. The
user needs the tag "monitoring".

Exit status: 0 nothing found, 1 findings, 2 usage, 3 could not look. "stormguard
doctor --help" has the details.`,
		Example: `  stormguard doctor rabbitmq --url http://guest:guest@localhost:15672 --queue orders --dlq orders.dlq
  stormguard doctor rabbitmq --url https://rabbit:15671 --ca ca.pem --user doctor --password-file password --queue orders`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := errors.Join(e.need(cmd, "url", "queue"), e.form(access.HTTPAddress(e.url), access.HTTPForm+" of the management plugin"), e.access.Validate(false))
			if u, bad := url.Parse(e.url); bad == nil && u.Scheme == "http" && e.access.WantsTLS() {
				err = errors.Join(err, errors.New("--ca, --cert: need https:// in --url"))
			}
			if err != nil {
				return usageError{err}
			}
			target.Hold = e.hold
			return e.look(cmd, func(ctx context.Context, a *access.Access) (found []guard.Finding, err error) {
				if target.API, err = a.URL(e.url); err != nil {
					return nil, err
				}
				transport := &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: a.TLS()}
				defer transport.CloseIdleConnections()
				target.Client = &http.Client{Transport: transport, Timeout: 30 * time.Second}
				return inspectRabbitMQ(ctx, target)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&e.url, "url", "http://guest:guest@localhost:15672", "`address` of the management plugin: "+access.HTTPForm)
	f.StringVar(&target.VHost, "vhost", "/", "virtual host")
	f.StringVar(&target.Queue, "queue", "", "the queue that is consumed")
	f.StringVar(&target.DLQ, "dlq", "", "queue of the dead letters, if the guard writes them (amqp.WithDeadLetters)")
	f.BoolVar(&target.Native, "native", false, "the broker moves dead letters by the queue's dead-letter exchange (amqp.WithDeadLetterExchange)")
	e.number(f, &target.Prefetch, "prefetch", 1, 65535, "the consumer's prefetch")
	e.duration(f, &target.ConsumerTimeout, "consumer-timeout", time.Second, 8760*time.Hour, "the broker's consumer_timeout")
	e.duration(f, &target.HandlerTime, "handler-time", time.Microsecond, 24*time.Hour,
		"the usual time of one message, divided by the workers; without it the prefetch is not compared with the consumer timeout")
	e.flags(cmd)
	accessFlags(&e.ranges, f, &e.access, "", false)
	return cmd
}

// inspectRabbitMQ looks as [amqp.Inspect] does, and at what that leaves out: how
// many nodes keep the queues, and whether dead letters have a place at all.
func inspectRabbitMQ(ctx context.Context, target amqp.Target) ([]guard.Finding, error) {
	found, err := amqp.Inspect(ctx, target)
	if errors.Is(err, amqp.ErrQueueGone) {
		return []guard.Finding{{
			Severity: guard.Danger, Where: queueName(target.VHost, target.Queue),
			What: "it does not exist: what is published to it is dropped, unless the publisher asks for mandatory",
			Fix:  "check --queue and --vhost, or: " + declareQuorum(target.Queue),
		}}, nil
	}
	if err != nil {
		return nil, err
	}
	q, err := describeQueue(ctx, target, target.Queue)
	if err != nil || q == nil {
		return found, err
	}
	more := q.placement(target)
	if target.DLQ == "" && !target.Native && !q.deadLetters() {
		more = append(more, guard.Finding{
			Severity: guard.Warning, Where: queueName(target.VHost, q.Name),
			What: "it has no dead-letter exchange, and no --dlq is given: a message that keeps failing has nowhere to go and stops the queue",
			Fix:  "amqp.NewDLQ and amqp.WithDeadLetters in the program, and --dlq here",
		})
	}
	if target.DLQ != "" {
		letters, err := describeQueue(ctx, target, target.DLQ)
		if err != nil {
			return append(found, more...), err
		}
		if letters != nil { // Inspect says that it does not exist
			more = append(more, letters.placement(target)...)
		}
	}
	found = append(found, more...)
	slices.SortStableFunc(found, func(a, b guard.Finding) int { return int(b.Severity) - int(a.Severity) })
	return found, nil
}

// queueInfo is a queue as the management API tells it.
type queueInfo struct {
	Name      string         `json:"name"`
	Type      string         `json:"type"`
	Arguments map[string]any `json:"arguments"`
	Policy    map[string]any `json:"effective_policy_definition"`
	Members   []string       `json:"members"`     // of a quorum queue or a stream
	Mirrors   []string       `json:"slave_nodes"` // of a classic queue, before RabbitMQ 4
}

// describeQueue asks for a queue; nil if there is none of that name.
func describeQueue(ctx context.Context, target amqp.Target, name string) (*queueInfo, error) {
	u, err := url.Parse(target.API)
	if err != nil {
		return nil, errors.New("the address of the API cannot be read")
	}
	u = u.JoinPath("api", "queues", url.PathEscape(target.VHost), url.PathEscape(name))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, errors.New("the address of the API cannot be used")
	}
	resp, err := target.Client.Do(req)
	if err != nil {
		return nil, connectError(u.Redacted(), err)
	}
	defer resp.Body.Close() //nolint:errcheck // it was read
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return nil, nil //nolint:nilnil // there is none
	default:
		return nil, fmt.Errorf("%s: %s", u.Redacted(), resp.Status)
	}
	var q queueInfo
	if err := json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(&q); err != nil {
		return nil, fmt.Errorf("%s: %w", u.Redacted(), err)
	}
	return &q, nil
}

func (q *queueInfo) deadLetters() bool {
	_, byArgument := q.Arguments["x-dead-letter-exchange"]
	_, byPolicy := q.Policy["dead-letter-exchange"]
	return byArgument || byPolicy
}

// placement looks at how many nodes keep the queue.
func (q *queueInfo) placement(target amqp.Target) []guard.Finding {
	f := guard.Finding{Severity: guard.Warning, Where: queueName(target.VHost, q.Name)}
	switch {
	case q.Type == string(amqp.Classic):
		f.What = "it is a classic queue: one node keeps it"
		if len(q.Mirrors) > 0 {
			f.What = "it is a mirrored classic queue: RabbitMQ 4 has no mirrors"
		}
		if q.Name == target.Queue {
			f.What += ". It counts no deliveries, so a message that crashes its consumer does so for ever"
		}
		f.Fix = "move to a quorum queue of another name: " + declareQuorum("NAME")
	case len(q.Members) == 1:
		f.What = "it has one replica: the disk of one node is all there is"
		add := "rabbitmq-queues add_member"
		if q.Type == string(amqp.Stream) {
			add = "rabbitmq-streams add_replica"
		}
		f.Fix = fmt.Sprintf("add nodes to the cluster, then: %s -p %s %s NODE", add, target.VHost, q.Name)
	default:
		return nil
	}
	return []guard.Finding{f}
}

func declareQuorum(name string) string {
	return "rabbitmqadmin declare queue name=" + name + ` durable=true arguments='{"x-queue-type":"quorum"}'`
}

func queueName(vhost, name string) string {
	if vhost == "/" {
		return "queue /" + name
	}
	return "queue " + vhost + "/" + name
}
