// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

var _ guard.Spiller[jetstream.Msg] = (*consumePort)(nil)

// spillHead is what the spill keeps of a message beside its data.
type spillHead struct {
	Subject  string                 `json:"subject"`
	Header   nats.Header            `json:"header,omitempty"`
	Metadata *jetstream.MsgMetadata `json:"metadata,omitempty"`
}

// Spill is [guard.Spiller]'s.
func (p *consumePort) Spill(m jetstream.Msg) (head, body []byte, err error) {
	h := spillHead{Subject: m.Subject(), Header: m.Headers()}
	if md, err := p.copies.of(m).Metadata(); err == nil {
		h.Metadata = md
	}
	head, err = json.Marshal(h)
	return head, m.Data(), err
}

// Unspill is [guard.Spiller]'s.
func (p *consumePort) Unspill(head, body []byte) (jetstream.Msg, error) {
	m := &spilledMsg{data: body}
	if err := json.Unmarshal(head, &m.head); err != nil {
		return nil, fmt.Errorf("nats: a message in the spill: %w", err)
	}
	return m, nil
}

// spilledMsg is a message from the spill. The server has its ack, so the handler can tell
// it nothing.
type spilledMsg struct {
	head spillHead
	data []byte
}

func (m *spilledMsg) Data() []byte         { return m.data }
func (m *spilledMsg) Headers() nats.Header { return m.head.Header }
func (m *spilledMsg) Subject() string      { return m.head.Subject }
func (m *spilledMsg) Reply() string        { return "" }

func (m *spilledMsg) Metadata() (*jetstream.MsgMetadata, error) {
	if m.head.Metadata == nil {
		return nil, jetstream.ErrNotJSMessage
	}
	return m.head.Metadata, nil
}

func (m *spilledMsg) Ack() error                       { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) DoubleAck(context.Context) error  { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) Nak() error                       { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) NakWithDelay(time.Duration) error { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) InProgress() error                { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) Term() error                      { return jetstream.ErrMsgAlreadyAckd }
func (m *spilledMsg) TermWithReason(string) error      { return jetstream.ErrMsgAlreadyAckd }
