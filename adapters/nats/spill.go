// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

var _ guard.Spiller[jetstream.Msg] = (*consumePort)(nil)

// spillHead is the part of a message that the spill keeps in addition to its data. Texts are
// bytes, since they need not be UTF-8.
type spillHead struct {
	Subject  []byte                 `json:"subject"`
	Header   []spillHeader          `json:"header,omitempty"`
	Metadata *jetstream.MsgMetadata `json:"metadata,omitempty"`
}

type spillHeader struct {
	Name   []byte   `json:"name"`
	Values [][]byte `json:"values"`
}

// Spill implements [guard.Spiller].
func (p *consumePort) Spill(m jetstream.Msg) (head, body []byte, err error) {
	h := spillHead{Subject: []byte(m.Subject())}
	for name, values := range m.Headers() {
		kept := spillHeader{Name: []byte(name)}
		for _, v := range values {
			kept.Values = append(kept.Values, []byte(v))
		}
		h.Header = append(h.Header, kept)
	}
	if md, err := p.copies.of(m).Metadata(); err == nil {
		h.Metadata = md
	}
	head, err = json.Marshal(h)
	return head, m.Data(), err
}

// Unspill implements [guard.Spiller].
func (p *consumePort) Unspill(head, body []byte) (jetstream.Msg, error) {
	var h spillHead
	if err := json.Unmarshal(head, &h); err != nil {
		return nil, fmt.Errorf("nats: a message in the spill: %w", err)
	}
	m := &spilledMsg{subject: string(h.Subject), metadata: h.Metadata, data: body}
	if len(h.Header) > 0 {
		m.header = make(nats.Header, len(h.Header))
	}
	for _, kept := range h.Header {
		for _, v := range kept.Values {
			m.header[string(kept.Name)] = append(m.header[string(kept.Name)], string(v))
		}
	}
	return m, nil
}

// allowInProgress wraps messages for handle, so that InProgress also succeeds on an acked message. A
// message on the disk is acked at the server, and needs no more time there.
func allowInProgress(handle func(context.Context, jetstream.Msg) error) func(context.Context, jetstream.Msg) error {
	return func(ctx context.Context, m jetstream.Msg) error { return handle(ctx, workedMsg{m}) }
}

type workedMsg struct{ jetstream.Msg }

func (m workedMsg) InProgress() error {
	if err := m.Msg.InProgress(); !errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
		return err
	}
	return nil
}

// spilledMsg is a message from the spill. The server has its ack, so the handler can no
// longer settle it.
type spilledMsg struct {
	subject  string
	header   nats.Header
	metadata *jetstream.MsgMetadata
	data     []byte
}

func (m *spilledMsg) Data() []byte         { return m.data }
func (m *spilledMsg) Headers() nats.Header { return m.header }
func (m *spilledMsg) Subject() string      { return m.subject }
func (m *spilledMsg) Reply() string        { return "" }

func (m *spilledMsg) Metadata() (*jetstream.MsgMetadata, error) {
	if m.metadata == nil {
		return nil, jetstream.ErrNotJSMessage
	}
	return m.metadata, nil
}

func (m *spilledMsg) Ack() error                       { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) DoubleAck(context.Context) error  { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) Nak() error                       { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) NakWithDelay(time.Duration) error { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) InProgress() error                { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) Term() error                      { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) TermWithReason(string) error      { return jetstream.ErrMsgAlreadyAckd }
