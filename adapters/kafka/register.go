// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/registers"
)

// RegisterConfig describes the topic of a [Register]. Topic is required.
type RegisterConfig struct {
	// Topic names the register's own topic, which has one partition.
	Topic string

	// Replicas is the number of replicas of a topic that is created, 1 to 32767. Unset means 3,
	// or one on each broker if there are fewer. With 2 or more, min.insync.replicas is 2.
	Replicas int16

	// NoCreate refuses a missing topic instead of creating it. The error has the command that
	// creates it.
	NoCreate bool
}

// Validate reports everything wrong at once.
func (c RegisterConfig) Validate() error {
	var errs []error
	if !cluster.ValidTopic(c.Topic) {
		errs = append(errs, fmt.Errorf("kafka: RegisterConfig.Topic: %q is not a topic's name", c.Topic))
	}
	if c.Replicas < 0 {
		errs = append(errs, fmt.Errorf("kafka: RegisterConfig.Replicas: %d is not within 1 and 32767", c.Replicas))
	}
	return errors.Join(errs...)
}

const (
	// registerTimeout bounds one wait for a broker. So a write ends even if nobody waits for it.
	registerTimeout = 3 * time.Second
	// registerPoll is how long a broker waits for a record that a watch asks for.
	registerPoll = time.Second
	// registerRecord is the largest record: a document and the line before it.
	registerRecord = register.MaxDocument + 256
	// registerFetch is how much is read at a time.
	registerFetch = 1 << 20
)

// Register is a [register.Register] in a topic of one partition. Each attempt to write is a
// record. All processes read the same log, and the first record for a number wins. A writer reads
// its own record to learn whether it has won.
//
// Each record is sent once, and acknowledged by all in-sync replicas. Readers see only records
// that all of these have. The topic keeps every record. With retention a losing record could
// become the first. With compaction the last record of a key would stay, and the winner is the
// first. So a start reads the topic from its beginning.
//
// Register makes its own connections, and one more for each Watch. Close ends them.
type Register struct {
	addrs []string
	sconf *sarama.Config
	cfg   RegisterConfig
	log   registers.Log
	good  atomic.Bool // the topic was created or checked

	mu     sync.Mutex
	client sarama.Client // nil while there is none
	closed bool
	calls  sync.WaitGroup // calls to brokers under way, also those that nobody waits for

	dialing chan struct{} // holds a token while one call connects
}

var _ register.Register = (*Register)(nil)

// NewRegister makes a Register, and asks the brokers nothing: the first use creates or checks the
// topic. If the topic may forget or lose a record, each method returns an [ErrUnsuitable] with
// the command that mends it.
//
// addrs are the brokers' addresses. config is for connecting: TLS, SASL and Version are taken
// from a copy of it. nil means sarama's defaults. A broker that does not answer is given up after
// 3 s.
func NewRegister(addrs []string, config *sarama.Config, cfg RegisterConfig) (*Register, error) {
	if config == nil {
		config = sarama.NewConfig()
	}
	c := *config
	c.Metadata.AllowAutoTopicCreation = false
	c.Metadata.Retry.Max = 0
	c.Net.DialTimeout = min(c.Net.DialTimeout, registerTimeout)
	c.Net.ReadTimeout = min(c.Net.ReadTimeout, registerTimeout)
	c.Net.WriteTimeout = min(c.Net.WriteTimeout, registerTimeout)
	c.Admin.Timeout = registerTimeout
	c.Consumer.IsolationLevel = sarama.ReadUncommitted
	errs := []error{cfg.Validate(), c.Validate()}
	if !c.Version.IsAtLeast(sarama.V1_0_0_0) {
		errs = append(errs, cluster.Unsuitable("Version: %s is too old for a register: set at least 1.0.0.0", c.Version))
	}
	if len(addrs) == 0 {
		errs = append(errs, errors.New("kafka: register: at least one address is needed"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Register{addrs: addrs, sconf: &c, cfg: cfg, dialing: make(chan struct{}, 1)}, nil
}

var errRegisterClosed = errors.New("kafka: the register is closed")

// Close ends the connections. It waits for running calls to brokers, some seconds at most. End
// each Watch before.
func (r *Register) Close() error {
	r.mu.Lock()
	client := r.client
	r.client, r.closed = nil, true
	r.mu.Unlock()
	var err error
	if client != nil {
		err = client.Close()
	}
	r.calls.Wait()
	return err
}

// within runs a call that waits for a broker on its own goroutine, because sarama's calls take no
// context. When ctx ends first, within returns, and the call goes on. The call ends within the
// timeouts of the connection, and Close waits for it.
func (r *Register) within(ctx context.Context, call func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return errRegisterClosed
	}
	r.calls.Add(1)
	r.mu.Unlock()
	answer := make(chan error, 1)
	go func() {
		defer r.calls.Done()
		answer <- call()
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// shared is the client of all calls except those of a Watch. One call connects, the others wait
// for it.
func (r *Register) shared(ctx context.Context) (sarama.Client, error) {
	select {
	case r.dialing <- struct{}{}:
		defer func() { <-r.dialing }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	r.mu.Lock()
	client := r.client
	r.mu.Unlock()
	if client != nil && !client.Closed() {
		return client, nil
	}
	client, err := r.connect()
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		go func() { _ = client.Close() }() // nobody has used it
		return nil, errRegisterClosed
	}
	r.client = client
	return client, nil
}

// connect makes a client, and creates or checks the topic if no call has done so.
func (r *Register) connect() (sarama.Client, error) {
	client, err := sarama.NewClient(r.addrs, r.sconf)
	if err != nil {
		return nil, fmt.Errorf("kafka: register: %w", err)
	}
	if !r.good.Load() {
		if err := r.ensure(client); err != nil {
			return nil, errors.Join(err, client.Close())
		}
		r.good.Store(true)
	}
	return client, nil
}

// drop gives up a client after an error of its connection. Only the call that takes the client
// out of the Register closes it: sarama's client must not be closed twice.
func (r *Register) drop(client sarama.Client) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.client == client {
		r.client = nil
		r.calls.Go(func() { _ = client.Close() })
	}
}

// ensure creates the topic if it is missing, and checks it.
func (r *Register) ensure(client sarama.Client) error {
	in, err := cluster.NewAdmin(client)
	if err != nil {
		return err
	}
	info, err := in.Topic(r.cfg.Topic)
	if err != nil {
		return err
	}
	if info == nil {
		topic := r.cfg.newTopic(len(client.Brokers()))
		if r.cfg.NoCreate {
			return cluster.Unsuitable("topic %s does not exist: %s", topic.Name, in.CreateCommand(topic))
		}
		if info, err = in.Create(client, topic); err != nil {
			return err
		}
	}
	return r.cfg.check(in, info)
}

func (c RegisterConfig) newTopic(brokers int) cluster.NewTopic {
	t := cluster.NewTopic{Name: c.Topic, Partitions: 1, Replicas: c.Replicas, Settings: map[string]string{
		"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1",
		"unclean.leader.election.enable": "false", "max.message.bytes": "1048588",
	}}
	if t.Replicas == 0 {
		t.Replicas = int16(max(1, min(3, brokers)))
	}
	if t.Replicas > 1 {
		t.Settings["min.insync.replicas"] = "2"
	}
	return t
}

// check refuses a topic that would forget or lose records. A setting that may not be read counts
// as good.
func (c RegisterConfig) check(in *cluster.Admin, t *cluster.Topic) error {
	var errs []error
	add := func(format string, args ...any) {
		errs = append(errs, cluster.Unsuitable("topic %s of a register: "+format, append([]any{t.Name}, args...)...))
	}
	if t.Partitions != 1 {
		add("it has %d partitions, and one log is needed: name another", t.Partitions)
	}
	if policy, ok := t.Settings["cleanup.policy"]; ok && policy != "delete" {
		add("cleanup.policy %s keeps the last record of a number, and the first has won: %s", policy, in.Alter(t.Name, "cleanup.policy=delete"))
	}
	for _, name := range []string{"retention.ms", "retention.bytes"} {
		if t.Number(name, -1) != -1 {
			add("%s %s would delete the configuration: %s", name, t.Settings[name], in.Alter(t.Name, name+"=-1"))
		}
	}
	if t.Settings["unclean.leader.election.enable"] == "true" {
		add("an unclean leader would lose what was decided: %s", in.Alter(t.Name, "unclean.leader.election.enable=false"))
	}
	if t.Replicas > 1 && t.Number("min.insync.replicas", 2) < 2 {
		add("min.insync.replicas %s lets one broker alone confirm: %s", t.Settings["min.insync.replicas"], in.Alter(t.Name, "min.insync.replicas=2"))
	}
	if n := t.Number("max.message.bytes", registerRecord); n < registerRecord {
		add("max.message.bytes %d is less than a record may have: %s", n, in.Alter(t.Name, fmt.Sprintf("max.message.bytes=%d", registerRecord)))
	}
	return errors.Join(errs...)
}

// catchUp reads up to the present end of the log.
func (r *Register) catchUp(client sarama.Client) error {
	end, err := client.GetOffset(r.cfg.Topic, 0, sarama.OffsetNewest)
	if err != nil {
		return fmt.Errorf("kafka: register: %w", err)
	}
	if next := r.log.Next(); end < next {
		return fmt.Errorf("kafka: register: topic %s ends at offset %d, and was read to %d: it was made anew, or has lost records", r.cfg.Topic, end, next)
	}
	for r.log.Next() < end {
		if err := r.fetch(client, time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// fetch reads the next records. If there are none, it waits for one, as long as wait.
func (r *Register) fetch(client sarama.Client, wait time.Duration) error {
	broker, err := client.Leader(r.cfg.Topic, 0)
	if err != nil {
		return fmt.Errorf("kafka: register: %w", err)
	}
	request := &sarama.FetchRequest{Version: 5, MinBytes: 1, MaxBytes: registerFetch, MaxWaitTime: int32(wait.Milliseconds())}
	from := r.log.Next()
	request.AddBlock(r.cfg.Topic, 0, from, registerFetch, -1)
	response, err := broker.Fetch(request)
	if err != nil {
		return fmt.Errorf("kafka: register: %w", err)
	}
	block := response.GetBlock(r.cfg.Topic, 0)
	switch {
	case block == nil:
		return fmt.Errorf("kafka: register: %w", sarama.ErrIncompleteResponse)
	case errors.Is(block.Err, sarama.ErrOffsetOutOfRange):
		return fmt.Errorf("kafka: register: topic %s has no record %d any more: it was made anew, or its first records were deleted", r.cfg.Topic, from)
	case !errors.Is(block.Err, sarama.ErrNoError):
		return fmt.Errorf("kafka: register: %w", block.Err)
	}
	for _, set := range block.RecordsSet {
		batch := set.RecordBatch
		if batch == nil || batch.PartialTrailingRecord {
			continue
		}
		for _, record := range batch.Records {
			if batch.Control {
				continue
			}
			if err := r.log.Fold(batch.FirstOffset+record.OffsetDelta, record.Value); err != nil {
				return fmt.Errorf("%w: kafka: topic %s: %w", register.ErrMalformed, r.cfg.Topic, err)
			}
		}
		r.log.Skip(batch.LastOffset() + 1)
	}
	return nil
}

// withClient runs a call with the shared client, and gives the client up on an error.
func (r *Register) withClient(ctx context.Context, call func(sarama.Client) error) error {
	return r.within(ctx, func() error {
		client, err := r.shared(ctx)
		if err != nil {
			return err
		}
		err = call(client)
		gaveUp := ctx.Err() != nil && errors.Is(err, ctx.Err()) // a dial's timeout is a DeadlineExceeded too
		if err != nil && !gaveUp && !errors.Is(err, register.ErrConflict) {
			r.drop(client)
		}
		return err
	})
}

// Read returns the newest document. It asks for the end of the log, and reads up to it.
func (r *Register) Read(ctx context.Context) (number uint64, document []byte, err error) {
	if err := r.withClient(ctx, r.catchUp); err != nil {
		return 0, nil, err
	}
	number, document = r.log.Newest()
	return number, document, nil
}

// States of an attempt to send a record.
const (
	notSent = iota
	sent
	givenUp
)

// CompareAndSet reads to the end of the log, writes a record, and reads until it has that record.
// If another writer was faster, it returns a [register.ConflictError]. The losing record, if it
// was written, stays in the log.
func (r *Register) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if err := register.Check(number, document); err != nil {
		return err
	}
	id := rand.Text()
	var state atomic.Int32
	err := r.withClient(ctx, func(client sarama.Client) error {
		if err := r.catchUp(client); err != nil {
			return err
		}
		if newest, _ := r.log.Newest(); newest != number-1 {
			return &register.ConflictError{Newest: newest}
		}
		broker, err := client.Leader(r.cfg.Topic, 0)
		if err == nil {
			_, err = broker.Connected()
		}
		if err != nil {
			return fmt.Errorf("kafka: register: %w", err)
		}
		r.log.Expect(id)
		defer r.log.Forget(id)
		if !state.CompareAndSwap(notSent, sent) {
			return ctx.Err()
		}
		if err := r.produce(broker, registers.Encode(number, id, document)); err != nil {
			return err
		}
		return r.outcome(client, id)
	})
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) && !state.CompareAndSwap(notSent, givenUp) {
		return fmt.Errorf("%w: kafka: %w", register.ErrUnknown, err)
	}
	return err
}

// produce writes one record, once.
func (r *Register) produce(broker *sarama.Broker, value []byte) error {
	now := time.Now()
	request := &sarama.ProduceRequest{Version: 3, RequiredAcks: sarama.WaitForAll, Timeout: int32(registerTimeout.Milliseconds())}
	request.AddBatch(r.cfg.Topic, 0, &sarama.RecordBatch{
		Version: 2, FirstTimestamp: now, MaxTimestamp: now, ProducerID: -1, ProducerEpoch: -1, FirstSequence: -1,
		Records: []*sarama.Record{{Value: value}},
	})
	response, err := broker.Produce(request)
	if err != nil {
		return fmt.Errorf("%w: kafka: %w", register.ErrUnknown, err)
	}
	block := response.GetBlock(r.cfg.Topic, 0)
	if block == nil {
		return fmt.Errorf("%w: kafka: %w", register.ErrUnknown, sarama.ErrIncompleteResponse)
	}
	switch block.Err {
	case sarama.ErrNoError:
		return nil
	case sarama.ErrNotEnoughReplicas, sarama.ErrMessageSizeTooLarge, sarama.ErrTopicAuthorizationFailed, sarama.ErrInvalidMessage:
		return fmt.Errorf("kafka: register: %w", block.Err) // the broker has not written it
	default: // a broker may report a moved leader after it has written the record
		return fmt.Errorf("%w: kafka: %w", register.ErrUnknown, block.Err)
	}
}

// outcome reads until it has read the acknowledged record, and tells whether that has won.
func (r *Register) outcome(client sarama.Client, id string) error {
	for {
		switch read, won, newest := r.log.Outcome(id); {
		case won:
			return nil
		case read:
			return &register.ConflictError{Newest: newest}
		}
		if err := r.fetch(client, 100*time.Millisecond); err != nil {
			return fmt.Errorf("%w: %w", register.ErrUnknown, err)
		}
	}
}

// Watch calls on with the newest document as the log grows. A broker that does not answer for 3 s
// counts as away.
func (r *Register) Watch(ctx context.Context, on func(register.Event)) error {
	return registers.Watch(ctx, func(number uint64, document []byte, err error) {
		on(register.Event{Number: number, Document: document, Err: err})
	}, r.session)
}

// session is one connection of a Watch. It has its own client: a broker answers the requests of a
// connection one after the other, and the request of a Watch waits.
func (r *Register) session(ctx context.Context, emit func(uint64, []byte) error) error {
	var client sarama.Client
	var over bool
	var mu sync.Mutex // guards client and over: ctx may end while a call makes the client
	defer func() {
		mu.Lock()
		defer mu.Unlock()
		over = true
		if client != nil {
			r.closeAside(client)
		}
	}()
	starting, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	err := r.within(starting, func() error {
		c, err := r.connect()
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if over {
			return c.Close()
		}
		client = c
		return nil
	})
	if err != nil {
		return err
	}
	read := func() error { return r.catchUp(client) }
	for {
		if err := r.within(ctx, read); err != nil {
			return err
		}
		if err := emit(r.log.Newest()); err != nil {
			return err
		}
		read = func() error { return r.fetch(client, registerPoll) }
	}
}

// closeAside closes a client that a call may still use. Close waits until that is done.
func (r *Register) closeAside(client sarama.Client) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		go func() { _ = client.Close() }() // a Watch that outlived Close
		return
	}
	r.calls.Go(func() { _ = client.Close() })
}
