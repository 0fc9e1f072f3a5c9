// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/guard"
)

func newDoctorRabbitMQ() *cobra.Command {
	var e examination
	target := guardamqp.Target{Prefetch: 256, ConsumerTimeout: 30 * time.Minute}
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
	f.StringVar(&target.DLQ, "dlq", "", "queue of the dead letters, if the guard writes them (guardamqp.WithDeadLetters)")
	f.BoolVar(&target.Native, "native", false, "the broker moves dead letters by the queue's dead-letter exchange (guardamqp.WithDeadLetterExchange)")
	e.number(f, &target.Prefetch, "prefetch", 1, 65535, "the consumer's prefetch")
	e.duration(f, &target.ConsumerTimeout, "consumer-timeout", time.Second, 8760*time.Hour, "the broker's consumer_timeout")
	e.duration(f, &target.HandlerTime, "handler-time", time.Microsecond, 24*time.Hour,
		"the usual time of one message, divided by the workers; without it the prefetch is not compared with the consumer timeout")
	e.flags(cmd)
	accessFlags(&e.ranges, f, &e.access, "", false)
	return cmd
}

// inspectRabbitMQ calls [guardamqp.Inspect]. A missing queue is a finding, not an error.
func inspectRabbitMQ(ctx context.Context, target guardamqp.Target) ([]guard.Finding, error) {
	found, err := guardamqp.Inspect(ctx, target)
	if errors.Is(err, guardamqp.ErrQueueGone) {
		return []guard.Finding{{
			Severity: guard.Danger, Where: queueName(target.VHost, target.Queue),
			What: "it does not exist: what is published to it is dropped, unless the publisher asks for mandatory",
			Fix:  "check --queue and --vhost, or: " + declareQuorum(target.Queue),
		}}, nil
	}
	return found, err
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
