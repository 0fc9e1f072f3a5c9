// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

func TestExercise(t *testing.T) {
	addr := brokers.ForTest(t, brokers.Kafka)
	for _, c := range []struct {
		name        string
		order       guard.Order
		workers     int
		passive     bool
		cooperative bool
		long        bool // only in the full run
	}{
		{"source", guard.OrderSource, 1, false, false, false},
		{"cooperative", guard.OrderSource, 1, false, true, true},
		{"key", guard.OrderKey, 4, false, true, false},
		{"none", guard.OrderNone, 4, false, false, true},
		{"passive", guard.OrderNone, 4, true, false, false},
		{"passive-order", guard.OrderSource, 1, true, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.long && !adaptertest.Full() {
				t.Skip("one more shape: run with STORMGUARD_FULL=1")
			}
			t.Parallel() // mostly waiting; each has topics and groups of its own
			cfg := testConfig()
			if c.cooperative {
				cfg = cooperativeConfig()
			}
			guardtest.Exercise(t, guardtest.Features{
				RealTime: true, Deadline: 60 * time.Second, Passive: c.passive, Order: c.order, Workers: c.workers, Keys: true,
				Headers: guardtest.HeaderBytes, EmptyBody: true, Prefix: true,
			}, func(t testing.TB, _ guardtest.Setup) guardtest.Subject {
				return newExercised(t, newRigAt(t, addr, 1, 1), cfg, c.passive)
			})
		})
	}
}

// exercised is a topic of one partition as a Subject.
type exercised struct {
	*rig
	cfg     *sarama.Config
	passive bool
	letters *DLQ
	commits *commits
	member  *member

	mu   sync.Mutex
	dead []dlq.Record // read so far
	next int64
}

func newExercised(t testing.TB, r *rig, cfg *sarama.Config, passive bool) *exercised {
	c := *cfg
	c.Consumer.Group.InstanceId = "member" // so that Kill can remove it
	e := &exercised{rig: r, cfg: &c, passive: passive, commits: &commits{group: []byte(r.group)}}
	c.Net.Proxy.Enable, c.Net.Proxy.Dialer = true, e.commits
	e.letters = r.dlq(DLQConfig{Sources: []string{r.topic}})
	return e
}

// dlq makes a DLQ that is closed and deleted with the test.
func (r *rig) dlq(cfg DLQConfig) *DLQ {
	r.t.Helper()
	d, err := NewDLQ(r.addrs, testConfig(), cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		for _, s := range cfg.Sources {
			_ = r.admin.DeleteTopic(cfg.name(s))
		}
		if err := d.Close(); err != nil {
			r.t.Error(err)
		}
	})
	return d
}

func (e *exercised) Publish(_ context.Context, ps ...guardtest.Publication) error {
	ms := make([]*sarama.ProducerMessage, len(ps))
	for i, p := range ps {
		m := &sarama.ProducerMessage{Topic: e.topic, Value: sarama.ByteEncoder(p.Body)}
		if p.Key != "" {
			m.Key = sarama.StringEncoder(p.Key)
		}
		for _, h := range p.Headers {
			m.Headers = append(m.Headers, sarama.RecordHeader{Key: []byte(h.Name), Value: headerBytes(h.Value)})
		}
		ms[i] = m
	}
	return e.producer.SendMessages(ms)
}

func (e *exercised) Start(c guardtest.Consumer) error {
	policy := c.Policy
	if policy.NoTimeout { // which no Kafka consumer may have
		policy.NoTimeout, policy.Timeout = false, 20*time.Second
	}
	opts := []Option{
		WithPolicy(policy), WithDeadLetters(c.Writer(e.letters)),
		WithStopTimeout(3 * time.Second), WithLogger(adaptertest.Log()),
		func(o *options) { o.lookEvery = 500 * time.Millisecond }, // for commits that are behind
	}
	handle := func(ctx context.Context, m *sarama.ConsumerMessage) error {
		return c.Handler(ctx, string(m.Key), m.Value)
	}
	h := Wrap(c.Guard, handle, opts...)
	if e.passive {
		h = WrapHandler(c.Guard, marking{handle, c.Twice}, opts...)
	}
	var err error
	e.member, err = e.tryJoin(e.cfg, h)
	return err
}

// marking is a program's own handler, which marks by itself.
type marking struct {
	handle func(context.Context, *sarama.ConsumerMessage) error
	twice  bool
}

func (marking) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (marking) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (h marking) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	for m := range c.Messages() {
		err := h.handle(s.Context(), m)
		settle := func() {
			if err == nil {
				s.MarkMessage(m, "")
			} else if err := Fail(s, m, err); err != nil {
				panic(err)
			}
		}
		settle()
		if h.twice {
			settle()
		}
	}
	return nil
}

func (e *exercised) Stop(ctx context.Context) error {
	e.member.cancel()
	select {
	case <-e.member.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Kill removes the member from its group: it hears of it with its next heartbeat,
// and what it did not commit is delivered again.
func (e *exercised) Kill(context.Context) error {
	resp, err := e.admin.RemoveMemberFromConsumerGroup(e.group, []string{"member"})
	if err == nil && !errors.Is(resp.Err, sarama.ErrNoError) {
		err = resp.Err
	}
	return err
}

// Revoke lets a rival join the group and leave again: two rebalances, in which the rival
// may have the partition for a while.
func (e *exercised) Revoke(ctx context.Context) error {
	cfg := *e.cfg
	cfg.Consumer.Group.InstanceId = "" // a static member does not leave
	r := &rival{joined: make(chan struct{})}
	m, err := e.tryJoin(&cfg, r)
	if err != nil {
		return err
	}
	select {
	case <-r.joined:
	case <-ctx.Done():
		err = ctx.Err()
	}
	m.cancel()
	<-m.done
	return err
}

// rival has a claim and reads nothing.
type rival struct {
	once   sync.Once
	joined chan struct{}
}

func (r *rival) Setup(sarama.ConsumerGroupSession) error {
	r.once.Do(func() { close(r.joined) })
	return nil
}

func (*rival) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (*rival) ConsumeClaim(s sarama.ConsumerGroupSession, _ sarama.ConsumerGroupClaim) error {
	<-s.Context().Done()
	return nil
}

// RefuseAcks makes the broker refuse commits, with an error of its own. It takes a later
// one for all of them.
func (e *exercised) RefuseAcks(err error) { e.commits.refused.Store(err != nil) }

// commits is a network on whose way a commit can lose the name of its group.
type commits struct {
	group   []byte
	refused atomic.Bool
}

func (c *commits) Dial(network, addr string) (net.Conn, error) {
	conn, err := net.Dial(network, addr)
	if err != nil {
		return nil, err
	}
	return &commitConn{conn, c}, nil
}

type commitConn struct {
	net.Conn

	all *commits
}

// offsetCommit is the key of the request.
const offsetCommit = 8

func (c *commitConn) Write(p []byte) (int, error) { // sarama writes a request at once
	if c.all.refused.Load() && len(p) > 6 && binary.BigEndian.Uint16(p[4:]) == offsetCommit {
		p = bytes.Replace(p, c.all.group, bytes.Repeat([]byte("x"), len(c.all.group)), 1)
	}
	return c.Conn.Write(p)
}

func (e *exercised) DeadLetters(ctx context.Context) ([]dlq.Record, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	topic := e.topic + ".dlq"
	end, err := e.client.GetOffset(topic, 0, sarama.OffsetNewest)
	if err != nil {
		return nil, err
	}
	if e.next < end {
		ms, err := e.read(ctx, topic, 0, e.next, end)
		if err != nil {
			return nil, err
		}
		for _, m := range ms {
			r, err := ReadDeadLetter(m)
			if err != nil {
				return nil, err
			}
			e.dead = append(e.dead, r)
			e.next = m.Offset + 1
		}
	}
	return append([]dlq.Record(nil), e.dead...), nil
}

// read is the messages of a partition from an offset to the end.
func (r *rig) read(ctx context.Context, topic string, partition int32, from, end int64) ([]*sarama.ConsumerMessage, error) {
	consumer, err := sarama.NewConsumerFromClient(r.client)
	if err != nil {
		return nil, err
	}
	defer consumer.Close()
	part, err := consumer.ConsumePartition(topic, partition, from)
	if err != nil {
		return nil, err
	}
	defer part.Close()
	var ms []*sarama.ConsumerMessage
	for from < end {
		select {
		case m := <-part.Messages():
			ms = append(ms, m)
			from = m.Offset + 1
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return ms, nil
}

func (e *exercised) Backlog(context.Context) (guardtest.Backlog, error) {
	return guardtest.Backlog{Pending: int(e.pending()), Delivered: -1}, nil
}
