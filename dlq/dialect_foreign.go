// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"slices"
	"time"
)

var smallRyeGrammar = grammar{
	dialect:   smallRye,
	system:    "kafka",
	signature: [][]string{{"dead-letter-reason", "dead-letter-topic", "dead-letter-exception-class-name"}},
	fields: []field{
		{"dead-letter-topic", slotSource, text},
		{"dead-letter-partition", slotPartition, decimal},
		{"dead-letter-offset", slotOffset, decimal},
		{"dead-letter-reason", slotErrorMessage, text},
		{"dead-letter-exception-class-name", slotOuterType, text},
		{"dead-letter-cause-class-name", slotInnerType, text},
	},
	owns: []string{"dead-letter-cause"},
}

// karafkaGrammar requires three names, since any program may use one of them.
var karafkaGrammar = grammar{
	dialect:   karafka,
	system:    "kafka",
	signature: [][]string{{"source_topic"}, {"source_partition"}, {"source_offset"}},
	fields: []field{
		{"source_topic", slotSource, text},
		{"source_partition", slotPartition, decimal},
		{"source_offset", slotOffset, decimal},
		{"source_consumer_group", slotGroup, text},
		{"source_attempts", slotAttempts, decimal},
	},
	owns: []string{"source_trace_id"},
}

// watermillGrammar reads the handler as the group: the handler is what failed.
var watermillGrammar = grammar{
	dialect:   watermill,
	fold:      true,
	signature: [][]string{{"reason_poisoned"}},
	fields: []field{
		{"reason_poisoned", slotErrorMessage, text},
		{"topic_poisoned", slotSource, text},
		{"handler_poisoned", slotGroup, text},
		{"_watermill_requeuer_retries", slotRedrives, decimal},
	},
	owns:   []string{"subscriber_poisoned", "_watermill_delayed_until", "_watermill_delayed_for"},
	broker: true,
}

// massTransitGrammar reads a number of retries. MassTransit omits it if there was no retry.
var massTransitGrammar = grammar{
	dialect:   massTransit,
	signature: [][]string{{"MT-Reason", "MT-Fault-*"}},
	fields: []field{
		{"MT-Reason", slotReason, text},
		{"MT-Fault-InputAddress", slotAddress, text},
		{"MT-Fault-ConsumerType", slotGroup, text},
		{"MT-Fault-ExceptionType", slotErrorType, text},
		{"MT-Fault-Message", slotErrorMessage, text},
		{"MT-Fault-StackTrace", slotErrorStack, text},
		{"MT-Fault-Timestamp", slotLastFailed, isoTime},
		{"MT-Fault-RetryCount", slotRetries, decimal},
		{"MT-Fault-RedeliveryCount", slotRetries, decimal},
	},
	owns:   []string{"MT-Fault-*", "MT-Host-*"},
	broker: true,
}

var nServiceBusGrammar = grammar{
	dialect:   nServiceBus,
	signature: [][]string{{"NServiceBus.FailedQ", "NServiceBus.ExceptionInfo.*"}},
	fields: []field{
		{"NServiceBus.FailedQ", slotSource, text},
		{"NServiceBus.TimeOfFailure", slotLastFailed, nServiceBusTime},
		{"NServiceBus.ExceptionInfo.ExceptionType", slotOuterType, text},
		{"NServiceBus.ExceptionInfo.InnerExceptionType", slotInnerType, text},
		{"NServiceBus.ExceptionInfo.Message", slotErrorMessage, text},
		{"NServiceBus.ExceptionInfo.StackTrace", slotErrorStack, text},
		{"NServiceBus.FLRetries", slotRetries, decimal},
		{"NServiceBus.Retries", slotRetries, decimal},
	},
	owns:   []string{"NServiceBus.ExceptionInfo.*"},
	broker: true,
}

var wolverineGrammar = grammar{
	dialect:   wolverine,
	fold:      true,
	signature: [][]string{{"exception-type"}, {"failed-at", "original-destination"}},
	fields: []field{
		{"original-destination", slotAddress, text},
		{"original-partition", slotPartition, decimal},
		{"original-offset", slotOffset, decimal},
		{"exception-type", slotErrorType, text},
		{"exception-message", slotErrorMessage, text},
		{"exception-stack", slotErrorStack, text},
		{"failed-at", slotLastFailed, millisText},
	},
	broker: true,
}

// knativeGrammar reads the failed address as the group. The attributes are called ce_... on
// Kafka and Ce-... over HTTP.
var knativeGrammar = grammar{
	dialect: knative,
	fold:    true,
	signature: [][]string{{
		"knativeerrordest", "ce_knativeerrordest", "ce-knativeerrordest",
		"knativeerrorcode", "ce_knativeerrorcode", "ce-knativeerrorcode",
	}},
	fields: []field{
		{"knativeerrordest", slotGroup, text},
		{"ce_knativeerrordest", slotGroup, text},
		{"ce-knativeerrordest", slotGroup, text},
		{"knativeerrorcode", slotErrorType, httpStatus},
		{"ce_knativeerrorcode", slotErrorType, httpStatus},
		{"ce-knativeerrorcode", slotErrorType, httpStatus},
		{"knativeerrordata", slotErrorMessage, maybeBase64},
		{"ce_knativeerrordata", slotErrorMessage, maybeBase64},
		{"ce-knativeerrordata", slotErrorMessage, maybeBase64},
	},
}

// cronsumerGrammar requires two names: x-retry-count alone is common in other programs.
var cronsumerGrammar = grammar{
	dialect:   cronsumer,
	system:    "kafka",
	signature: [][]string{{"x-retry-count"}, {"x-retry-attempt-count", "x-error-message", "x-produce-time"}},
	fields: []field{
		{"x-retry-count", slotRetries, decimal},
		{"x-error-message", slotErrorMessage, text},
	},
	owns: []string{"x-retry-attempt-count", "x-produce-time"},
}

var springAMQPGrammar = grammar{
	dialect:   springAMQP,
	system:    "rabbitmq",
	signature: [][]string{{"x-exception-message", "x-exception-stacktrace"}},
	fields: []field{
		{"x-exception-message", slotErrorMessage, text},
		{"x-exception-stacktrace", slotErrorStack, text},
		{"x-original-exchange", slotExchange, text},
		{"x-original-routingKey", slotSubject, text},
	},
	broker: true,
}

// The reasons in x-death that decide which of its entries is the source.
const (
	reasonRejected Reason = "rejected"
	reasonExpired  Reason = "expired"
)

// rabbitMQGrammar reads the single headers first. Then x-death, which is more exact,
// overwrites them if it is there.
var rabbitMQGrammar = grammar{
	dialect:   rabbitMQ,
	system:    "rabbitmq",
	signature: [][]string{{"x-death", "x-first-death-reason"}},
	fields: []field{
		{"x-first-death-queue", slotSource, text},
		{"x-last-death-queue", slotSource, text},
		{"x-first-death-exchange", slotExchange, text},
		{"x-last-death-exchange", slotExchange, text},
		{"x-first-death-reason", slotReason, text},
		{"x-last-death-reason", slotReason, text},
	},
	hook: readDeaths,
}

// fillFromBroker fills fields that the dialect left empty from RabbitMQ's headers, but not
// Reason: the broker's reason may concern an earlier round through a retry queue.
func (d *decoder) fillFromBroker() {
	whole := d.r
	var b Record
	d.r = &b
	d.read(&rabbitMQGrammar)
	d.r = whole

	orElse(&whole.Origin.System, "rabbitmq")
	orElse(&whole.Attempts, b.Attempts)
	if whole.FirstFailed.IsZero() {
		whole.FirstFailed = b.FirstFailed
	}
	if d.leftBy != reasonExpired {
		orElse(&whole.Origin.Source, b.Origin.Source)
	}
	if whole.Origin.Exchange == "" && whole.Origin.Subject == "" {
		whole.Origin.Exchange, whole.Origin.Subject = b.Origin.Exchange, b.Origin.Subject
	}
}

func orElse[T comparable](at *T, v T) {
	var zero T
	if *at == zero {
		*at = v
	}
}

// readDeaths reads x-death: one table for each queue and reason, the latest first, with the
// number of deaths there and the time of the first.
//
// The source is the queue of the latest death that was not an expiry, since messages leave
// a retry queue by expiry. If all were expiries, it is the queue of the latest. Rejections
// count as attempts: a consumer had the message.
func readDeaths(d *decoder, g *grammar) {
	i := d.last(g, "x-death")
	if i < 0 {
		return
	}
	const want = "a list of tables with queue, reason, time, exchange, routing-keys and count"
	list, ok := d.headers[i].Value.([]any)
	if !ok {
		d.bad(i, want)
		return
	}
	d.state[i] = stateRead
	var deaths []death
	for _, e := range list {
		t, isTable := e.(map[string]any)
		x, ok := readDeath(t)
		if (!ok || !isTable) && d.state[i] != stateBad {
			d.bad(i, want)
		}
		if isTable {
			deaths = append(deaths, x)
		}
	}
	if len(deaths) == 0 {
		return
	}
	at := max(0, slices.IndexFunc(deaths, func(x death) bool { return x.reason != reasonExpired }))
	source := deaths[at]
	o := &d.r.Origin
	o.Source, o.Exchange, o.Subject = source.queue, source.exchange, source.key
	d.leftBy = source.reason
	d.r.Reason = deaths[0].reason
	var rejected int64
	for _, x := range deaths {
		if x.reason == reasonRejected {
			rejected = min(rejected+x.count, slotTable[slotAttempts].max)
		}
		if !x.time.IsZero() && (d.r.FirstFailed.IsZero() || x.time.Before(d.r.FirstFailed)) {
			d.r.FirstFailed = x.time
		}
	}
	d.r.Attempts = int(rejected)
	if deaths[0].count == 1 {
		d.r.LastFailed = deaths[0].time
	}
}

type death struct {
	queue, exchange, key string
	reason               Reason
	time                 time.Time
	count                int64
}

// readDeath returns all values that it can read; ok is false if it could not read one of
// them.
func readDeath(t map[string]any) (x death, ok bool) {
	ok = true
	str := func(name string) (s string) {
		if v, there := t[name]; there {
			var is bool
			if s, is = asText(v); !is {
				ok = false
			}
		}
		return s
	}
	x.queue, x.exchange, x.reason = str("queue"), str("exchange"), Reason(str("reason"))
	if v, there := t["time"]; there {
		at, is := isoTime.decode(v)
		x.time, ok = at.t, ok && is
	}
	if v, there := t["count"]; there {
		n, is := asInt(v)
		if !is || n < 0 {
			n, ok = 0, false
		}
		x.count = min(n, slotTable[slotAttempts].max)
	}
	if v, there := t["routing-keys"]; there {
		keys, is := v.([]any)
		ok = ok && is
		if len(keys) > 0 {
			x.key, is = asText(keys[0])
			ok = ok && is
		}
	}
	return x, ok
}
