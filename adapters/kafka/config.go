// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/guard"
)

// settleTime is the part of the rebalance timeout for the last commit and for joining again. The
// heartbeat that tells of the rebalance needs another part.
const settleTime = 2 * time.Second

// margin is how much earlier than the rebalance timeout a claim must be left.
func margin(c *sarama.Config) time.Duration { return c.Consumer.Group.Heartbeat.Interval + settleTime }

// grace is how long a claim may take to end after its revoke.
func grace(c *sarama.Config) time.Duration { return c.Consumer.Group.Rebalance.Timeout - margin(c) }

// limits are the broker's limits for one claim.
func limits(c *sarama.Config) guard.Limits {
	return guard.Limits{RevokeGrace: grace(c), EndsWithInput: true}
}

// Check reports all faults of a configuration that the Setup of [Wrap] would refuse, so that a
// program knows before it joins a group. After nil, Setup accepts the configuration, unless retry
// topics do not fit the group's topics: only the session tells that. Use [CheckHandler] for
// [WrapHandler].
func Check(g *guard.Guard, config *sarama.Config, opts ...Option) error {
	return check(g, config, false, opts)
}

// CheckHandler is [Check] for [WrapHandler].
func CheckHandler(g *guard.Guard, config *sarama.Config, opts ...Option) error {
	return check(g, config, true, opts)
}

func check(g *guard.Guard, config *sarama.Config, passive bool, opts []Option) error {
	o, err := newOptions(g, opts)
	errs := []error{err}
	if g == nil {
		errs = append(errs, errors.New("kafka: the guard must not be nil"))
	}
	if config == nil {
		errs = append(errs, errors.New("kafka: the configuration must not be nil"))
	}
	if g != nil && config != nil {
		errs = append(errs, o.refused(g, config, passive))
	}
	return errors.Join(errs...)
}

// refused reports settings that cannot be run safely.
func (o *options) refused(g *guard.Guard, c *sarama.Config, passive bool) error {
	policy := g.Config().Policy
	if o.policy != nil {
		policy = *o.policy
	}
	errs := []error{policy.Validate()}
	add := func(format string, args ...any) { errs = append(errs, cluster.Unsuitable(format, args...)) }
	if b := policy.Breaker; b != (guard.Policy{}).Breaker && b != g.Config().Policy.Breaker {
		errs = append(errs, errors.New("kafka: Policy.Breaker: differs from the Guard's, whose scopes share one configuration: set it in guard.Config.Policy"))
	}
	timeout := o.timeout(g)
	group := &c.Consumer.Group
	switch left := grace(c); {
	case left <= 0:
		add("Consumer.Group.Rebalance.Timeout: %s leaves nothing for a handler beside %s for the heartbeat that tells of a rebalance and the last commit: set it above %s, such as %s",
			group.Rebalance.Timeout, margin(c), margin(c), timeout+margin(c))
	case policy.NoTimeout:
		add("Policy.NoTimeout: a handler that runs for ever cannot leave its claim within the %s that Consumer.Group.Rebalance.Timeout leaves: set a Timeout", left)
	case timeout > left:
		add("Policy.Timeout: %s is more than the %s that Consumer.Group.Rebalance.Timeout of %s leaves; a handler that heeds nothing else would outlive the claim: lower it, or set the rebalance timeout to %s",
			timeout, left, group.Rebalance.Timeout, timeout+margin(c))
	}
	if c.Consumer.Offsets.Initial == sarama.OffsetNewest && group.ResetInvalidOffsets && !o.newest {
		add("Consumer.Offsets.Initial: OffsetNewest with Consumer.Group.ResetInvalidOffsets skips what is left of the log once the committed offset is gone: set Initial to OffsetOldest, or ResetInvalidOffsets to false, or accept it by WithSkipToNewest")
	}
	if !passive && !c.Consumer.Offsets.AutoCommit.Enable {
		add("Consumer.Offsets.AutoCommit.Enable: false: nobody would commit what the guard marks, and it marks only what is settled: leave it on")
	}
	if !c.Version.IsAtLeast(sarama.V0_11_0_0) {
		add("Version: %s has no headers, so no trace and no dead letter could say where it comes from: set at least 0.11.0.0, better 2.8.0.0", c.Version)
	}
	if passive && (o.setup != nil || o.cleanup != nil) {
		add("WithSetup, WithCleanup: WrapHandler calls its handler's own Setup and Cleanup: use these")
	}
	if policy.Spill {
		if g.Config().SpillDir == "" {
			add("Policy.Spill: needs guard.Config.SpillDir, a directory on a local disk")
		}
		if passive || o.retries != nil {
			add("Policy.Spill: not with WrapHandler or WithRetryTopics: unset it")
		}
	}
	if o.retries != nil {
		if passive {
			add("WithRetryTopics: WrapHandler cannot park messages: use Wrap")
		}
		if o.letters == nil {
			add("WithRetryTopics: needs WithDeadLetters, for what is still failing after the last delay")
		}
		if policy.Order == guard.OrderSource {
			add("Policy.Order: source, with WithRetryTopics: a parked message leaves the order of its partition: set Policy.Order to key, so that the later messages of its key follow it, or to none")
		}
	}
	return errors.Join(errs...)
}

// defaultTimeout is the default of Policy.Timeout.
const defaultTimeout = 30 * time.Second

// timeout is the handler's timeout.
func (o *options) timeout(g *guard.Guard) time.Duration {
	policy := g.Config().Policy
	if o.policy != nil {
		policy = *o.policy
	}
	return cmp.Or(policy.Timeout, defaultTimeout)
}

// order is the order of the policy.
func (o *options) order(g *guard.Guard) guard.Order {
	if o.policy != nil {
		return o.policy.Order
	}
	return g.Config().Policy.Order
}

// passivePolicy is the policy of a passive source. With [WithBatchMarks] and without
// Policy.Workers, as many messages may be out as the window has, maxOut at most, and OrderSource
// becomes OrderNone.
func (o *options) passivePolicy(g *guard.Guard) *guard.Policy {
	policy := g.Config().Policy
	if o.policy != nil {
		policy = *o.policy
	}
	if policy.Workers > 0 || !o.batchMarks {
		return o.policy
	}
	policy.Workers = min(cmp.Or(policy.Window, maxOut), maxOut)
	if policy.Order == guard.OrderSource {
		policy.Order = guard.OrderNone
	}
	return &policy
}

// maxOut is the default window, and the largest number of Workers.
const maxOut = 1024

// cooperative tells whether a revoke leaves the session's context alive: all
// strategies must say that they support it.
func cooperative(c *sarama.Config) bool {
	strategies := c.Consumer.Group.Rebalance.GroupStrategies
	if s := c.Consumer.Group.Rebalance.Strategy; s != nil {
		strategies = []sarama.BalanceStrategy{s}
	}
	for _, s := range strategies {
		p, ok := s.(sarama.RebalanceProtocolBalanceStrategy)
		if !ok || !slices.Contains(p.SupportedProtocols(), sarama.RebalanceProtocolCooperative) {
			return false
		}
	}
	return len(strategies) > 0
}

// settings are what a consumer group runs with.
type settings struct {
	config *sarama.Config
	client sarama.Client // nil if unknown
	group  string
}

// look finds the settings of sarama's own session, which has no method for them. It reads
// unexported fields by name and exact type. If sarama has changed them, or the session is not
// sarama's own, look finds nothing, and Setup asks for [WithConfig].
func look(s sarama.ConsumerGroupSession) (found settings) {
	v := reflect.ValueOf(s)
	for _, name := range []string{"", "parent"} {
		if name != "" {
			v = v.FieldByName(name)
		}
		if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
			return settings{}
		}
		v = v.Elem()
	}
	if f := v.FieldByName("config"); f.IsValid() && f.Type() == reflect.TypeFor[*sarama.Config]() {
		found.config = (*sarama.Config)(f.UnsafePointer())
	}
	if f := v.FieldByName("groupID"); f.IsValid() && f.Kind() == reflect.String {
		found.group = f.String()
	}
	if f := v.FieldByName("client"); f.IsValid() && f.CanAddr() && f.Type() == reflect.TypeFor[sarama.Client]() {
		found.client = *(*sarama.Client)(f.Addr().UnsafePointer())
	}
	return found
}

// settingsOf takes the settings from the options, and missing ones from the session.
func (o *options) settingsOf(g *guard.Guard, s sarama.ConsumerGroupSession) (settings, error) {
	set := look(s)
	if o.client != nil {
		set.client, set.config = o.client, o.client.Config()
	}
	if o.config != nil {
		set.config = o.config
	}
	if o.group != "" {
		set.group = o.group
	}
	if set.group == "" {
		set.group = g.Config().Group
	}
	if set.config == nil {
		return set, cluster.Unsuitable("the configuration of the consumer group is not to be found in a session of type %T: pass it by WithConfig", s)
	}
	return set, nil
}

// stopping tells whether a session's context is over because the program stops. Otherwise the
// group rebalances or the session broke.
//
// sarama derives the session's context from the context given to Consume. If the given context is
// over, the program stops, whatever the cause: signal.NotifyContext puts the signal there, and a
// program may put its own cause. ConsumerGroup.Close ends only the session's context, without a
// cause. So does a cooperative member that fails to join again: the context does not tell the two
// apart, so stopped asks stopping only if it cannot see a Close. The handlers of such a member
// then have [WithStopTimeout]. For that long they may run beside the partitions' next owners, but
// never longer than a revoke may take.
func stopping(ctx context.Context) bool {
	if given := parentOf(ctx); given != nil && given.Err() != nil {
		return true
	}
	// Not errors.Is: it takes the timeout of a dial, by which sarama may also end a session, for
	// a DeadlineExceeded.
	cause := context.Cause(ctx)
	return cause == context.Canceled || cause == context.DeadlineExceeded //nolint:errorlint // see above
}

// parentOf is the parent of a context of package context, which embeds its parent; nil if it is
// not found.
func parentOf(ctx context.Context) context.Context {
	v := reflect.ValueOf(ctx)
	if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
		return nil
	}
	f := v.Elem().FieldByName("Context")
	if !f.IsValid() || !f.CanInterface() || f.Type() != reflect.TypeFor[context.Context]() {
		return nil
	}
	parent, _ := reflect.TypeAssert[context.Context](f)
	return parent
}

func sourceName(prefix, topic string, partition int32) string {
	name := fmt.Sprintf("%s/%d", topic, partition)
	if prefix != "" {
		return prefix + "/" + name
	}
	return name
}
